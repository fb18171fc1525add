"""AdamW whose states are on a disk, mapped into memory a block at a time while a step uses them.

Each rank has one file without a name, which the kernel removes when its process ends, however it
ends. A resumed run reads the states of its checkpoint, never such a file.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from app.model.streaming import MEASURED_BYTES, read_mb_per_second
from app.process.heartbeat import refresh_liveness
from app.process.launch import is_first_rank
from app.strategy.mixin import ShardedTensor, local
from app.strategy.settings import STATE_BLOCK_BYTES
from common.errors import DiskError

log = logging.getLogger(__name__)

_MOMENTS = ("exp_avg", "exp_avg_sq")
_GIB = 1 << 30


class StateFile:
    """One rank's file, whose room is allocated before the first step."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        """Raise DiskError, with the bytes that are needed and free, if the disk lacks room."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.mb_per_second = _measure_disk(folder, num_bytes)
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
            if num_bytes:
                # Now, since a page of a sparse file that finds no room ends the process by SIGBUS.
                os.posix_fallocate(self._file.fileno(), 0, num_bytes)
        except OSError as error:
            free = shutil.disk_usage(folder if folder.exists() else "/").free
            raise DiskError(
                f"{folder}: the optimizer states of a rank need {num_bytes / _GIB:.2f} GiB, and "
                f"{free / _GIB:.2f} GiB are free ({error.strerror}); type "
                "strategy.offload_dir=FOLDER on a disk with room"
            ) from error
        self._end = 0

    def reserve(self, shape: torch.Size, dtype: torch.dtype) -> DiskTensor:
        """Return a tensor of zeros in the file."""
        start, numel = self._end, shape.numel()
        self._end += _padded(numel * dtype.itemsize)
        whole = partial(self.map, start, numel, dtype)
        return DiskTensor(shape, dtype, lambda: whole().view(shape), self, start)

    def map(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Map `numel` values as a flat tensor; they are unmapped when it is freed."""
        if not numel:
            return torch.empty(0, dtype=dtype)
        mapped = mmap.mmap(self._file.fileno(), numel * dtype.itemsize, offset=offset)
        mapped.madvise(mmap.MADV_WILLNEED)
        return torch.frombuffer(mapped, dtype=dtype)

    def close(self) -> None:
        """Give the disk space back."""
        self._file.close()


@dataclass(frozen=True, slots=True)
class DiskTensor(ShardedTensor):
    """A dense tensor in a rank's file: a moment of its part of a weight.

    `gather` maps this part: its pages are read from the disk when they are used.
    """

    file: StateFile
    offset: int

    def block(self, number: int) -> Tensor:
        """Map one of the flat blocks that the tensor is stepped in."""
        size = block_size(self.dtype)
        start = number * size
        offset = self.offset + start * self.dtype.itemsize
        return self.file.map(offset, min(size, self.shape.numel() - start), self.dtype)

    def copy_(self, value: Tensor) -> DiskTensor:
        """Write `value`, which may be on any device."""
        for number, part in enumerate(value.reshape(-1).split(block_size(self.dtype))):
            self.block(number).copy_(part)
        return self


class AdamWOnDisk(torch.optim.AdamW):
    """Fused AdamW whose moments are in a file; its steps equal those in memory bit for bit."""

    def __init__(self, groups: Iterable[dict[str, Any]], folder: Path, **options: Any) -> None:
        super().__init__(groups, fused=True, **options)
        parts = [local(weight) for group in self.param_groups for weight in group["params"]]
        self.num_bytes = sum(len(_MOMENTS) * _padded(part.nbytes) for part in parts)
        self._file = StateFile(folder, self.num_bytes)
        if is_first_rank():
            written, read = self._file.mb_per_second
            seconds = self.num_bytes / 1e6 / written + self.num_bytes / 1e6 / read
            log.info(
                "optimizer states: %.2f GiB a rank on the disk of %s, which writes %.0f and reads "
                "%.0f MB/s: %.3g s per optimizer step, less while free memory caches them",
                *(self.num_bytes / _GIB, folder, written, read, seconds),
            )

    def reserve(self, weight: Tensor) -> DiskTensor:
        """Return a moment of a weight, zero at first, or of this rank's shard of it."""
        part = local(weight)
        return self._file.reserve(part.shape, part.dtype)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the closure with gradients, then step one weight after the other."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step_weight(group, weight)
        return loss

    def _step_weight(self, group: dict[str, Any], weight: torch.nn.Parameter) -> None:
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
            state |= {key: self.reserve(weight) for key in _MOMENTS}
        size = block_size(weight.dtype)
        parts = local(weight).detach().view(-1).split(size)
        gradients = local(weight.grad).reshape(-1).split(size)
        step = state["step"]
        for number, pair in enumerate(zip(parts, gradients, strict=True)):
            step = state["step"].clone()  # each block takes the same step
            self._step_block(group, *pair, [state[key].block(number) for key in _MOMENTS], step)
        state["step"] = step
        refresh_liveness()  # a step of a large model takes minutes

    def _step_block(
        self,
        group: dict[str, Any],
        part: Tensor,
        gradient: Tensor,
        mapped: list[Tensor],
        step: Tensor,
    ) -> None:
        moments = [moment.to(part.device) for moment in mapped]  # themselves on a CPU
        adamw(
            *([part], [gradient], moments[:1], moments[1:], [], [step]),
            fused=True,
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for kept, moment in zip(mapped, moments, strict=True):
            if moment is not kept:
                kept.copy_(moment)

    def close(self) -> None:
        """Give the disk space back; the states must not be used any more."""
        self._file.close()


def block_size(dtype: torch.dtype) -> int:
    return STATE_BLOCK_BYTES // dtype.itemsize


def _padded(num_bytes: int) -> int:
    return math.ceil(num_bytes / mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


def _measure_disk(folder: Path, num_bytes: int) -> tuple[float, float]:
    """Return the MB/s at which the disk of `folder` writes and reads, without the page cache.

    All ranks measure at once, as they step, with at most `num_bytes`, for which it has room.
    """
    size = min(MEASURED_BYTES, max(num_bytes, 1))
    content = os.urandom(size)  # a file system may compress zeros
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        start = time.perf_counter()
        file.write(content)
        os.fdatasync(file.fileno())
        seconds = time.perf_counter() - start
        return size / 1e6 / seconds, read_mb_per_second(file, size)
