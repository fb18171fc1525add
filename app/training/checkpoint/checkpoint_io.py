"""What Lightning calls to write and read a checkpoint: its dictionary, as files of the store.

Which checkpoint to go on from is decided before; nothing is looked for here.
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
    random_state_of,
    read_training,
)
from app.training.checkpoint.store import CheckpointStore
from app.training.checkpoint.tensors import write_share
from app.training.nonfinite import check_finite

KEPT_BY_NAME = ("state_dict", "optimizer_states")
FOLLOWS_FROM_STEP = ("epoch", "global_step", "loops", "lr_schedulers")
ALIGNMENT = 64
"""bytes; where a tensor starts in a buffer"""
OF_THE_WRITER = ("pytorch-lightning_version", "training", "metric", "details")


class StoredCheckpoints(CheckpointIO):
    """Write checkpoints into `store`, and read `source`; every rank has one.

    With `writer` the step that is saved pays for a copy alone, and the writer's thread does the
    rest; what fails there is raised by the next `check` or `wait`, or by `teardown`.
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
        self._due: list[Callable[[], object]] = []
        """before the save under way is committed"""

    def reserve(
        self, model: Mapping[str, StateTensor], optimizer: Mapping[str, StateTensor]
    ) -> None:
        """Make room in host memory for what will be saved, on the first rank."""
        if self.writer is not None:
            self.writer.reserve({MODEL: model, OPTIMIZER: optimizer})

    def do_before_commit(self, work: Callable[[], object]) -> None:
        """Do `work` before the save under way is committed: now, or in the writer's thread."""
        if self.writer is None:
            work()
        else:
            self._due.append(work)

    def add_tensors(
        self,
        step: int,
        tensors: Mapping[str, Mapping[str, StateTensor]],
        *,
        rank: int,
        num_ranks: int,
    ) -> None:
        """Write this rank's share of `tensors`, by file and name, before the save is committed.

        All ranks call it. TrainingFault where a number is not finite: nothing is kept of it.
        """
        if self.writer is not None:
            if rank == 0:  # no strategy that scatters states is let in here
                copies = {
                    name: self.writer.snapshot(name, named) for name, named in tensors.items()
                }
                self._due.append(partial(self._write_copies, step, copies))
            return
        write, check = partial(self.store.add_tensors, step), partial(check_finite, step)
        # Where this rank fails, the others still need it to gather theirs.
        failures: list[SaveError | TrainingFault] = []
        held = [
            {name: kept for name, kept in named.items() if not isinstance(kept, ShardedTensor)}
            for named in tensors.values()
        ]
        try:
            check_finite(step, *held)
        except TrainingFault as failure:
            failures.append(failure)
        for name, named in tensors.items():
            try:
                write_share(write, name, named, check, rank=rank, num_ranks=num_ranks)
            except (SaveError, TrainingFault) as failure:
                failures.append(failure)
        if failures:
            raise failures[0]

    def _write_copies(self, step: int, copies: Mapping[str, Mapping[str, Tensor]]) -> None:
        try:
            check_finite(step, *copies.values())
        except TrainingFault:
            self.store.abandon(step)
            raise
        for name, named in copies.items():
            self.store.add_tensors(step, name, named)

    def wait(self) -> None:
        """Wait for a save under way; call it before the next one begins."""
        if self.writer is not None:
            self.writer.wait()

    def check(self) -> None:
        """Raise what has failed of a save under way; called behind each step."""
        if self.writer is not None:
            self.writer.check()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Write what `FinetuneModule.on_save_checkpoint` has made of Lightning's dictionary.

        The save has started, and every rank has added what is its own: the first commits.
        """
        if not is_first_rank():
            return
        known = (*KEPT_BY_NAME, *FOLLOWS_FROM_STEP, *OF_THE_WRITER)
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
            due, self._due = self._due, []

            def write_beside() -> None:
                for work in due:
                    work()
                write()

            self.writer.submit(write_beside)

    def teardown(self) -> None:
        """Wait until all is written."""
        if self.writer is not None:
            self.writer.close()

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return what Lightning and the module's hooks restore; tensors are read when used."""
        if self.source is None or Path(path) != self.source.folder:
            raise ValueError(f"{path} is not the checkpoint that this run goes on from")
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
        """Refuse: the store alone removes checkpoints."""
        raise NotImplementedError(f"{path}: checkpoints are removed by their store")


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
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)


def _aligned(tensor: Tensor) -> int:
    return math.ceil(tensor.nbytes / ALIGNMENT) * ALIGNMENT
