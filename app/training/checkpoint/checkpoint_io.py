"""Lightning's CheckpointIO on top of the checkpoint store, and saving in the background.

The checkpoint to resume from is passed in; this module never searches for one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.plugins import CheckpointIO
from torch import Tensor

from app.process.launch import is_first_rank
from app.strategy.state import ShardedTensor, StateTensor
from app.training.checkpoint.checkpoint import Checkpoint
from app.training.checkpoint.disk import SaveError
from app.training.checkpoint.documents import (
    MODEL,
    OPTIMIZER,
    TRAINING,
    local_state_name,
    random_state_name,
    read_training,
)
from app.training.checkpoint.store import CheckpointStore
from app.training.checkpoint.tensors import write_share
from app.training.nonfinite import check_finite
from common.errors import TrainingFault

STORED_AS_TENSORS = ("state_dict", "optimizer_states")
DERIVED_FROM_STEP = ("epoch", "global_step", "loops", "lr_schedulers")
ALIGNMENT = 64
"""tensors in a buffer start at multiples of so many bytes"""
ADDED_BY_US = ("pytorch-lightning_version", "training", "metric", "details")


class StoredCheckpoints(CheckpointIO):
    """Write checkpoints to `store` and read `source`, on every rank.

    With `writer`, training waits only for a copy to host memory, which a thread then writes; its
    errors are raised by the next `check`, `wait` or `teardown`.
    """

    def __init__(
        self,
        store: CheckpointStore,
        source: Checkpoint | None = None,
        writer: BackgroundWriter | None = None,
        identity: Mapping[str, Any] | None = None,
    ) -> None:
        self.store, self.source, self.writer = store, source, writer
        self.details = (
            {} if identity is None else {"run": {key: identity[key] for key in ("id", "plan")}}
        )
        self._before_commit: list[Callable[[], object]] = []
        """functions that the writer's thread calls before it commits the current save"""

    def reserve(
        self, model: Mapping[str, StateTensor], optimizer: Mapping[str, StateTensor]
    ) -> None:
        """Allocate host buffers for snapshots of these tensors; called on rank 0."""
        if self.writer is not None:
            self.writer.reserve({MODEL: model, OPTIMIZER: optimizer})

    def do_before_commit(self, work: Callable[[], object]) -> None:
        """Call `work` before the current save is committed: now, or in the writer's thread."""
        if self.writer is None:
            work()
        else:
            self._before_commit.append(work)

    def add_tensors(
        self,
        step: int,
        tensors: Mapping[str, Mapping[str, StateTensor]],
        *,
        rank: int,
        num_ranks: int,
    ) -> None:
        """Write this rank's share of `tensors`, by file and name, before the save is committed.

        All ranks must call this. TrainingFault if a value is not finite; the save is then removed.
        """
        if self.writer is not None:
            if rank == 0:  # asynchronous saves are refused with sharding strategies
                copies = {
                    name: self.writer.snapshot(name, named) for name, named in tensors.items()
                }
                self._before_commit.append(partial(self._write_copies, step, copies))
            return
        write, check = partial(self.store.add_tensors, step), partial(check_finite, step)
        # If this rank fails, the others still need it for their gathers.
        failures: list[SaveError | TrainingFault] = []
        replicated = [
            {
                name: tensor
                for name, tensor in named.items()
                if not isinstance(tensor, ShardedTensor)
            }
            for named in tensors.values()
        ]
        try:
            check_finite(step, *replicated)
        except TrainingFault as failure:
            failures.append(failure)
        for name, named in tensors.items():
            try:
                write_share(write, name, named, check, rank=rank, num_ranks=num_ranks)
            except (SaveError, TrainingFault) as failure:
                failures.append(failure)
        if failures:
            raise failures[0]

    def add_local_state(self, step: int, tensors: Mapping[str, Tensor], *, rank: int) -> None:
        """Write the tensors that only this rank holds, if any, before the save is committed."""
        name = local_state_name(rank)
        if tensors and self.writer is not None and rank == 0:
            copies = {name: self.writer.snapshot(name, tensors)}
            self._before_commit.append(partial(self._write_copies, step, copies))
        elif tensors:
            check_finite(step, tensors)
            self.store.add_tensors(step, name, tensors)

    def _write_copies(self, step: int, copies: Mapping[str, Mapping[str, Tensor]]) -> None:
        try:
            check_finite(step, *copies.values())
        except TrainingFault:
            self.store.abandon(step)
            raise
        for name, named in copies.items():
            self.store.add_tensors(step, name, named)

    def wait(self) -> None:
        """Wait for a background save; call it before the next one starts."""
        if self.writer is not None:
            self.writer.wait()

    def check(self) -> None:
        """Raise the error of a background save that has failed; called after each step."""
        if self.writer is not None:
            self.writer.check()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Commit the current save, on rank 0, with what `on_save_checkpoint` added.

        Called once every rank has added its files.
        """
        if not is_first_rank():
            return
        known = (*STORED_AS_TENSORS, *DERIVED_FROM_STEP, *ADDED_BY_US)
        lightning_state = {key: value for key, value in checkpoint.items() if key not in known}
        training = checkpoint["training"] | {"lightning": lightning_state}
        metric, details = checkpoint["metric"], checkpoint["details"] | self.details
        step = training["step"]
        needed = [random_state_name(rank) for rank in range(details["num_ranks"])]

        def write() -> None:
            self.store.add_document(step, TRAINING, training)
            self.store.commit(step, needed=needed, metric=metric, details=details)

        if self.writer is None:
            write()
        else:
            training = copy.deepcopy(training)  # training extends its lists while the thread writes
            before_commit, self._before_commit = self._before_commit, []

            def write_all() -> None:
                for work in before_commit:
                    work()
                write()

            self.writer.submit(write_all)

    def teardown(self) -> None:
        """Wait for a background save and end the thread."""
        if self.writer is not None:
            self.writer.close()

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the state that Lightning and the module restore; tensors are memory-mapped."""
        if self.source is None or Path(path) != self.source.folder:
            raise ValueError(f"{path} is not the checkpoint that this run resumes from")
        training = read_training(self.source)
        return training["lightning"] | {
            "pytorch-lightning_version": lightning.__version__,
            "state_dict": self.source.tensors(MODEL),
            "optimizer_states": [],
            "lr_schedulers": [],
            "training": training,
            "source": self.source,
        }

    def remove_checkpoint(self, path: Any) -> None:
        """Raise NotImplementedError, since only the store removes checkpoints."""
        raise NotImplementedError(f"{path}: only the store removes checkpoints")


class BackgroundWriter:
    """Write one snapshot at a time in a thread, which the process joins before it exits.

    An error in the thread is raised by the next call of any method.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._buffers: dict[str, Tensor] = {}

    def reserve(self, snapshots: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Allocate buffers for `snapshots` by name, in the thread.

        The first write to a memory page is slow; without this the first snapshot would pay for it.
        """
        sizes = {name: _buffer_size(tensors.values()) for name, tensors in snapshots.items()}

        def allocate() -> None:
            for name, (num_bytes, is_pinned) in sizes.items():
                self._buffers[name] = _new_buffer(num_bytes, is_pinned).zero_()

        self.submit(allocate)

    def snapshot(self, name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy `tensors` into the buffer of `name`, after the current write has ended.

        GPU tensors are copied into pinned memory without a host sync: the copy is complete when
        `submit` calls its function, and later GPU work is queued behind it.
        """
        self.wait()
        num_bytes, is_pinned = _buffer_size(tensors.values())
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
        """Call `write` in the thread, after the current write has ended."""
        self.wait()
        copied = torch.cuda.current_stream().record_event() if torch.cuda.is_initialized() else None

        def write_after_copy() -> None:
            if copied is not None:
                copied.synchronize()
            write()

        self._pending = self._executor.submit(write_after_copy)

    def wait(self) -> None:
        """Wait for the current write; raise its error, if any."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def check(self) -> None:
        """Raise the error of a write that has ended, without waiting."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def close(self) -> None:
        """Wait for the current write and end the thread; raise its error, if any."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()


def _buffer_size(tensors: Iterable[Tensor]) -> tuple[int, bool]:
    """Return the size of a buffer for `tensors` in bytes, and whether a GPU copies into it."""
    tensors = list(tensors)
    return sum(map(_aligned, tensors)), any(tensor.is_cuda for tensor in tensors)


def _new_buffer(num_bytes: int, is_pinned: bool) -> Tensor:
    """Allocate one buffer for all tensors, since pinning memory is slower than copying into it."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)


def _aligned(tensor: Tensor) -> int:
    return math.ceil(tensor.nbytes / ALIGNMENT) * ALIGNMENT
