"""Write a run's metadata when its training starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L


class WriteMetadata(L.Callback):
    """Call `write` on the first rank: before a new run, and when a resumed one starts to train.

    Until then a resumed run's folder stays as the run before left it: this process may yet fail.
    `write_manifest` is called where a new run starts to train with other micro-batches.
    """

    def __init__(
        self,
        write: Callable[[], None],
        write_manifest: Callable[[], None],
        *,
        is_resumed: bool,
    ) -> None:
        self.write, self.write_manifest = write, write_manifest
        self.is_resumed = is_resumed
        self.is_written = False
        self._batching: Any = None

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        """Write the metadata of a new run."""
        if not self.is_resumed:
            self._write(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Write the metadata of a resumed run: its checkpoint is loaded on all ranks."""
        self._write(trainer)
        if trainer.is_global_zero and trainer.datamodule.batching != self._batching:
            self.write_manifest()

    def on_fit_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Write the metadata of a run that had no step left."""
        self._write(trainer)

    def _write(self, trainer: L.Trainer) -> None:
        if trainer.is_global_zero and not self.is_written:
            self.write()
            self._batching = trainer.datamodule.batching
        self.is_written = True
