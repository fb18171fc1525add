"""What Lightning calls to write and read a checkpoint: its dictionary, as files of the store.

Which checkpoint to go on from is decided before; nothing is looked for here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning
from lightning.fabric.plugins import CheckpointIO
from torch import Tensor

from app.errors import TrainingFault
from app.training.bad_numbers import check_finite
from app.training.checkpoint.background import BackgroundWriter
from app.training.checkpoint.checkpoint import Checkpoint
from app.training.checkpoint.store import CheckpointStore

MODEL, OPTIMIZER, TRAINING = "model", "optimizer", "training"
"""files of a checkpoint"""
KEPT_BY_NAME = ("state_dict", "optimizer_states", "optimizer_tensors")
FOLLOWS_FROM_STEP = ("epoch", "global_step", "loops", "lr_schedulers")
OF_THE_WRITER = ("pytorch-lightning_version", "training", "metric", "details")


class StoredCheckpoints(CheckpointIO):
    """Write checkpoints into `store`, on the first rank; read `source`, on every rank.

    With `writer` the step that is saved pays for a copy alone, and the writer's thread does the
    rest; what fails there is raised by the next `wait`, or by `teardown`.
    """

    def __init__(
        self,
        store: CheckpointStore,
        source: Checkpoint | None = None,
        writer: BackgroundWriter | None = None,
    ) -> None:
        self.store, self.source, self.writer = store, source, writer
        self._due: list[Callable[[], object]] = []
        """before the save under way is committed"""

    def reserve(self, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
        """Make room in host memory for what will be saved, on the first rank."""
        if self.writer is not None:
            self.writer.reserve({MODEL: model, OPTIMIZER: optimizer})

    def do_before_commit(self, work: Callable[[], object]) -> None:
        """Do `work` before the save under way is committed: now, or in the writer's thread."""
        if self.writer is None:
            work()
        else:
            self._due.append(work)

    def wait(self) -> None:
        """Wait for a save under way; call it before the next one begins."""
        if self.writer is not None:
            self.writer.wait()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Write what `FinetuneModule.on_save_checkpoint` has made of Lightning's dictionary.

        The save has begun, and every rank has added what is its own.
        """
        known = (*KEPT_BY_NAME, *FOLLOWS_FROM_STEP, *OF_THE_WRITER)
        rest = {key: value for key, value in checkpoint.items() if key not in known}
        training = checkpoint["training"] | {"lightning": rest}
        tensors = {MODEL: checkpoint["state_dict"], OPTIMIZER: checkpoint["optimizer_tensors"]}
        metric, details = checkpoint["metric"], checkpoint["details"]
        step = training["step"]

        def write() -> None:
            for name, named in tensors.items():
                self.store.add_tensors(step, name, named)
            self.store.add_document(step, TRAINING, training)
            self.store.commit(step, metric=metric, details=details)

        if self.writer is None:
            write()
        else:
            training = copy.deepcopy(training)  # its lists grow while the thread writes
            tensors = {name: self.writer.snapshot(name, named) for name, named in tensors.items()}
            due, self._due = self._due, []

            def write_beside() -> None:
                try:
                    check_finite(step, *tensors.values())
                except TrainingFault:
                    self.store.abandon(step)
                    raise
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
        training = self.source.document(TRAINING)
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
