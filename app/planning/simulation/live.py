"""Live memory of the fake device by part, also of storages that are resized in place."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor

from app.planning.simulation.counting import OperatorCounter

ACTIVATIONS = "activations"
"""and all else that a step computes: the loss, and copies that autocast keeps"""


class LiveMemory(OperatorCounter):
    """Count a step, and the bytes that are alive on the device by part; `peak` is of one moment.

    What is made belongs to `part`, until `assign` says otherwise.
    """

    def __init__(self, seen: float) -> None:
        super().__init__(seen)
        self.part = ACTIVATIONS
        self.parts: Counter[str] = Counter()
        self.peak: dict[str, int] = {}
        self.peak_phase = ""
        self._live: dict[int, tuple[weakref.ref[Any], int, str]] = {}
        self._total = self._peak_total = 0

    def forget_peak(self) -> None:
        """Begin anew with what is alive now."""
        self._peak_total = 0
        self._note_peak()

    def assign(self, tensors: Iterable[Tensor | None], part: str) -> None:
        """Let storages belong to `part`, also those that were made unseen."""
        for tensor in tensors:
            if tensor is None:
                continue
            here = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            if here.device.type == "cuda":
                storage = here.untyped_storage()
                self._end(storage._cdata)
                self._begin(storage, part)
        self._note_peak()

    @contextmanager
    def making(self, part: str) -> Iterator[None]:
        """Let what is made meanwhile belong to `part`."""
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before

    @contextmanager
    def watching_fsdp(self) -> Iterator[None]:
        """Record FSDP's buffers, and what it resizes, which no operator shows."""
        own = torch.UntypedStorage.resize_

        def resize(storage: Any, size: int) -> Any:
            done = own(storage, size)
            if (known := self._live.get(storage._cdata)) is not None:
                self._end(storage._cdata)
                self._begin(storage, known[2])
                self._note_peak()
            return done

        with (
            patch.object(torch.UntypedStorage, "resize_", resize),
            self._wrapped("foreach_all_gather", "gathered"),
            self._wrapped("foreach_all_gather_copy_out", "gathered"),
            self._wrapped("foreach_reduce", "gradients"),
        ):
            yield

    @contextmanager
    def watching_gradients(self, weights: Iterable[Tensor]) -> Iterator[None]:
        """Record each gradient as soon as the backward pass has stored it with its weight."""

        def keep(weight: Tensor) -> None:
            self.assign([weight.grad], "gradients")

        handles = [weight.register_post_accumulate_grad_hook(keep) for weight in weights]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _wrapped(self, name: str, part: str) -> Any:
        function = getattr(_fsdp_param_group, name)

        def wrapped(*given: Any, **named: Any) -> Any:
            with self.making(part):
                return function(*given, **named)

        return patch.object(_fsdp_param_group, name, wrapped)

    def _keep(self, tensor: Tensor) -> None:
        super()._keep(tensor)
        here = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        storage = here.untyped_storage()
        known = self._live.get(storage._cdata)
        if known is None or known[0]() is not storage:
            self._end(storage._cdata)
            self._begin(storage, self.part)
            self._note_peak()

    def _begin(self, storage: Any, part: str) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._live[key] = weakref.ref(storage, partial(self._ended, key)), size, part
        self.parts[part] += size
        self._total += size

    def _end(self, key: int) -> None:
        if key in self._live:
            _, size, part = self._live.pop(key)
            self.parts[part] -= size
            self._total -= size

    def _ended(self, key: int, ref: weakref.ref[Any]) -> None:
        if key in self._live and self._live[key][0] is ref:
            self._end(key)

    def _note_peak(self) -> None:
        if self._total > self._peak_total:
            self._peak_total, self.peak = self._total, dict(self.parts)
            self.peak_phase = self.phase
