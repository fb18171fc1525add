"""What Lightning calls to write and read a checkpoint: its dictionary, as files of the store.

Which checkpoint to go on from is decided before; nothing is looked for here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning
from lightning.fabric.plugins import CheckpointIO
from torch import Tensor

from app.process.errors import TrainingFault
from app.process.launch import is_first_rank
from app.strategy.shards import ShardedTensor, StateTensor
from app.training.checkpoint.background import BackgroundWriter
from app.training.checkpoint.checkpoint import Checkpoint
from app.training.checkpoint.disk import SaveError
from app.training.checkpoint.documents import (
    MODEL,
    OPTIMIZER,
    TRAINING,
    random_state_of,
    read_training,
)
from app.training.checkpoint.shares import write_share
from app.training.checkpoint.store import CheckpointStore
from app.training.nonfinite import check_finite

KEPT_BY_NAME = ("state_dict", "optimizer_states")
FOLLOWS_FROM_STEP = ("epoch", "global_step", "loops", "lr_schedulers")
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
