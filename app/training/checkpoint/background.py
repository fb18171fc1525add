"""Save while training goes on: a step pays for a copy in host memory, a thread writes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT = 64
"""bytes; where a tensor starts in a buffer"""


class BackgroundWriter:
    """Write one snapshot at a time in a thread that the process waits for before it ends.

    What fails in the thread is raised by the next call of any method.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._buffers: dict[str, Tensor] = {}

    def reserve(self, names: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Make the buffers for snapshots like `names`, in the thread.

        A system gives memory when it is first written to, which takes longer than copying into it:
        the first snapshot would wait for that.
        """
        needed = {name: _room_for(tensors.values()) for name, tensors in names.items()}

        def make() -> None:
            for name, (num_bytes, is_pinned) in needed.items():
                self._buffers[name] = _new_buffer(num_bytes, is_pinned).zero_()

        self.submit(make)

    def snapshot(self, name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy `tensors` into buffers that `name` reuses, once the write under way has ended.

        A GPU's tensors go into pinned memory and are whole when `submit` runs its function: the
        host does not wait for them, and what the GPU is asked to do next comes after the copy.
        """
        self.wait()
        num_bytes, is_pinned = _room_for(tensors.values())
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) != num_bytes:
            buffer = self._buffers[name] = _new_buffer(num_bytes, is_pinned)
        copies, start = {}, 0
        for key, tensor in tensors.items():
            copy = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies[key] = copy.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
            start += _aligned(tensor)
        return copies

    def submit(self, write: Callable[[], None]) -> None:
        """Run `write` in the thread, once the write under way has ended."""
        import torch

        self.wait()
        copied = torch.cuda.current_stream().record_event() if torch.cuda.is_initialized() else None

        def write_what_is_copied() -> None:
            if copied is not None:
                copied.synchronize()
            write()

        self._pending = self._executor.submit(write_what_is_copied)

    def wait(self) -> None:
        """Wait until all is written; raise what failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def check(self) -> None:
        """Raise what has failed so far, without waiting."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def close(self) -> None:
        """Wait until all is written and end the thread; raise what failed."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()


def _room_for(tensors: Iterable[Tensor]) -> tuple[int, bool]:
    """Return the bytes of the buffer for `tensors`, and whether a GPU writes into it."""
    tensors = list(tensors)
    return sum(map(_aligned, tensors)), any(tensor.is_cuda for tensor in tensors)


def _new_buffer(num_bytes: int, is_pinned: bool) -> Tensor:
    """Make one buffer for all tensors: pinning memory takes longer than copying into it."""
    import torch

    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)


def _aligned(tensor: Tensor) -> int:
    return math.ceil(tensor.nbytes / ALIGNMENT) * ALIGNMENT
