"""Add up the storages that are alive after each operation of PyTorch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Bytes of live storages, and their peak since it was last set to 0."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def num_bytes(self) -> int:
        """Return the bytes of the storages that are alive."""
        self._storages = {
            key: (ref, size) for key, (ref, size) in self._storages.items() if not ref.expired()
        }
        return sum(size for _, size in self._storages.values())

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that were there before."""
        for tensor in tensors:
            self._add(tensor)

    def _add(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        ref, size = self._storages.get(storage._cdata, (None, 0))
        if ref is not None and not ref.expired() and size == storage.nbytes():
            return False
        self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        has_grown = False
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.device.type == "cpu":
                has_grown |= self._add(leaf)
        if has_grown:
            self.peak = max(self.peak, self.num_bytes())
        return output
