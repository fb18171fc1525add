"""Lightning's CheckpointIO on top of the store, and saving in the background.

Which checkpoint to resume from is decided before; nothing is searched for here.
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

from app.process.errors import TrainingFault
from app.process.launch import is_first_rank
from app.strategy.mixin import ShardedTensor, StateTensor
from app.training.checkpoint.checkpoint import Checkpoint
from app.training.checkpoint.disk import SaveError
from app.training.checkpoint.documents import (
    MODEL,
    OPTIMIZER,
    TRAINING,
    local_state_of,
    random_state_of,
    read_training,
)
from app.training.checkpoint.store import CheckpointStore
from app.training.checkpoint.tensors import write_share
from app.training.nonfinite import check_finite

STORED_AS_TENSORS = ("state_dict", "optimizer_states")
DERIVED_FROM_STEP = ("epoch", "global_step", "loops", "lr_schedulers")
ALIGNMENT = 64
"""bytes between the starts of two tensors in a buffer, at least"""
ADDED_BY_US = ("pytorch-lightning_version", "training", "metric", "details")


class StoredCheckpoints(CheckpointIO):
    """Write checkpoints into `store` and read `source`; every rank has one.

    With `writer` the training step waits only for a copy in host memory, and a thread writes it;
    its errors are raised by the next `check`, `wait` or `teardown`.
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
        """work of the current save that the writer's thread does before the commit"""

    def reserve(
        self, model: Mapping[str, StateTensor], optimizer: Mapping[str, StateTensor]
    ) -> None:
        """Allocate host memory for what will be saved, on rank 0."""
        if self.writer is not None:
            self.writer.reserve({MODEL: model, OPTIMIZER: optimizer})

    def do_before_commit(self, work: Callable[[], object]) -> None:
        """Do `work` before the current save is committed: now, or in the writer's thread."""
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

        All ranks call it. TrainingFault if a value is not finite: nothing of the save stays.
        """
        if self.writer is not None:
            if rank == 0:  # sharding strategies are refused with asynchronous saves
                copies = {
                    name: self.writer.snapshot(name, named) for name, named in tensors.items()
                }
                self._before_commit.append(partial(self._write_copies, step, copies))
            return
        write, check = partial(self.store.add_tensors, step), partial(check_finite, step)
        # If this rank fails, the others still need it to gather theirs.
        failures: list[SaveError | TrainingFault] = []
        local = [
            {
                name: tensor
                for name, tensor in named.items()
                if not isinstance(tensor, ShardedTensor)
            }
            for named in tensors.values()
        ]
        try:
            check_finite(step, *local)
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
        """Write what this rank alone holds, if anything, before the save is committed."""
        name = local_state_of(rank)
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
        """Raise the error of a background save, if it has failed; called after each step."""
        if self.writer is not None:
            self.writer.check()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Commit the save, on rank 0, with what `on_save_checkpoint` added to `checkpoint`.

        The save has started, and every rank has added its own files.
        """
        if not is_first_rank():
            return
        known = (*STORED_AS_TENSORS, *DERIVED_FROM_STEP, *ADDED_BY_US)
        rest = {key: value for key, value in checkpoint.items() if key not in known}
        training = checkpoint["training"] | {"lightning": rest}
        metric, details = checkpoint["metric"], checkpoint["details"] | self.details
        step = training["step"]
        needed = [random_state_of(rank) for rank in range(details["num_ranks"])]

        def write() -> None:
            self.store.add_document(step, TRAINING, training)
            self.store.commit(step, needed=needed, metric=metric, details=details)

        if self.writer is None:
            write()
        else:
            training = copy.deepcopy(training)  # its lists grow while the thread writes
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
        """Return what Lightning and the module's hooks restore; tensors are memory-mapped."""
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
        """Raise NotImplementedError: only the store removes checkpoints."""
        raise NotImplementedError(f"{path}: only the store removes checkpoints")


class BackgroundWriter:
    """Write one snapshot at a time in a thread that the process joins before it exits.

    An error in the thread is raised by the next call of any method.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._buffers: dict[str, Tensor] = {}

    def reserve(self, names: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Allocate buffers for snapshots like `names`, in the thread.

        The first write to a page takes longer than a copy into it: the first snapshot would wait.
        """
        needed = {name: _buffer_size(tensors.values()) for name, tensors in names.items()}

        def make() -> None:
            for name, (num_bytes, is_pinned) in needed.items():
                self._buffers[name] = _new_buffer(num_bytes, is_pinned).zero_()

        self.submit(make)

    def snapshot(self, name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy `tensors` into the buffer of `name`, once the current write has ended.

        A GPU's tensors go into pinned memory without a host sync: the copy is complete when
        `submit` runs its function, and later GPU work comes after it.
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
        """Run `write` in the thread, once the current write has ended."""
        self.wait()
        copied = torch.cuda.current_stream().record_event() if torch.cuda.is_initialized() else None

        def write_after_copy() -> None:
            if copied is not None:
                copied.synchronize()
            write()

        self._pending = self._executor.submit(write_after_copy)

    def wait(self) -> None:
        """Wait for the current write; raise its error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def check(self) -> None:
        """Raise the error of a write that has ended, without waiting."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def close(self) -> None:
        """Wait for the current write and end the thread; raise its error."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()


def _buffer_size(tensors: Iterable[Tensor]) -> tuple[int, bool]:
    """Return the bytes of a buffer for `tensors`, and whether a GPU copies into it."""
    tensors = list(tensors)
    return sum(map(_aligned, tensors)), any(tensor.is_cuda for tensor in tensors)


def _new_buffer(num_bytes: int, is_pinned: bool) -> Tensor:
    """Allocate one buffer for all tensors: pinning memory takes longer than copying into it."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)


def _aligned(tensor: Tensor) -> int:
    return math.ceil(tensor.nbytes / ALIGNMENT) * ALIGNMENT
