"""Track the bytes of live storages after each PyTorch operation."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Bytes of live storages, and their peak since it was last set to 0."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.num_bytes = 0
        self.peak = 0

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Count existing tensors."""
        for tensor in tensors:
            self._add(tensor)
        self._note_peak()

    def _note_peak(self) -> None:
        self.peak = max(self.peak, self.num_bytes)

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages:
            if self._storages[key][1] == size:
                return
            self._forget(key)
        self._storages[key] = weakref.ref(storage, partial(self._end, key)), size
        self.num_bytes += size

    def _end(self, key: int, ref: weakref.ref[Any]) -> None:
        if key in self._storages and self._storages[key][0] is ref:
            self._forget(key)

    def _forget(self, key: int) -> None:
        self.num_bytes -= self._storages.pop(key)[1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            # A DTensor's own storage is as large as the whole tensor, and is not there; its rank's
            # part is, and is made where no mode looks on.
            here = leaf._local_tensor if isinstance(leaf, DTensor) else leaf
            if isinstance(here, Tensor) and here.device.type == "cpu":
                self._add(here)
        self._note_peak()
        return output


class LiveResized(Live):
    """The same, for storages that are resized in place, as FSDP does to free gathered weights."""

    def _note_peak(self) -> None:
        for key, (ref, size) in list(self._storages.items()):
            storage = ref()
            if storage is not None and storage.nbytes() != size:
                self._storages[key] = ref, storage.nbytes()
                self.num_bytes += storage.nbytes() - size
        super()._note_peak()
