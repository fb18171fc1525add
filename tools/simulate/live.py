"""Track the live memory of the fake device by part, including storages that FSDP resizes."""

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

from tools.simulate.counting import OperatorCounter

ACTIVATIONS = "activations"
"""part for everything that a step computes, including the loss and autocast's copies"""


class LiveMemory(OperatorCounter):
    """Counts a step, and its live bytes by part; `peak` has the parts at the peak of their sum.

    A new tensor belongs to the current `part`, until `assign` moves it to another.
    """

    def __init__(self, num_pairs: float) -> None:
        super().__init__(num_pairs)
        self.part = ACTIVATIONS
        self.parts: Counter[str] = Counter()
        self.peak: dict[str, int] = {}
        self.peak_phase = ""
        self._live: dict[int, tuple[weakref.ref[Any], int, str]] = {}
        self._total = self._peak_total = 0

    def forget_peak(self) -> None:
        """Reset the peak to the current live memory."""
        self._peak_total = 0
        self._note_peak()

    def assign(self, tensors: Iterable[Tensor | None], part: str) -> None:
        """Assign storages to `part`, also those created outside of this mode."""
        for tensor in tensors:
            if tensor is None:
                continue
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            if local.device.type == "cuda":
                storage = local.untyped_storage()
                self._end(storage._cdata)
                self._begin(storage, part)
        self._note_peak()

    @contextmanager
    def making(self, part: str) -> Iterator[None]:
        """Assign tensors that are created in this context to `part`."""
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before

    @contextmanager
    def watching_fsdp(self) -> Iterator[None]:
        """Track FSDP's buffers, and storages that it resizes, which no operator shows."""
        original = torch.UntypedStorage.resize_

        def resize(storage: Any, size: int) -> Any:
            resized = original(storage, size)
            if (known := self._live.get(storage._cdata)) is not None:
                self._end(storage._cdata)
                self._begin(storage, known[2])
                self._note_peak()
            return resized

        with (
            patch.object(torch.UntypedStorage, "resize_", resize),
            self._wrapped("foreach_all_gather", "gathered"),
            self._wrapped("foreach_all_gather_copy_out", "gathered"),
            self._wrapped("foreach_reduce", "gradients"),
        ):
            yield

    @contextmanager
    def watching_gradients(self, weights: Iterable[Tensor]) -> Iterator[None]:
        """Assign each gradient to its part as soon as the backward pass stores it in its weight."""

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
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
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
