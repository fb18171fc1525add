"""Keep status.json in the run's folder current."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L

from app.process.status import EVALUATING, FAILED, STOPPED, TRAINING, update_status
from app.training.checkpoint.store import CheckpointStore
from common.errors import Interrupted, exit_code
from common.redaction import redact
from common.text import printable

MIN_SECONDS = 5.0
"""shortest time between two writes while the state stays: each one waits for the disk"""
FIGURES = {
    "loss": "train/loss",
    "val_loss": "val/loss",
    "tokens_per_second": "speed/tokens_per_second",
}
"""key in status.json -> metric, of which the latest value is written"""


class StatusFile(L.Callback):
    """Write progress from rank 0 after optimizer steps; after the saver, whose checkpoint counts.

    The loss and tokens/s are those of the latest row of metrics.csv, so nothing waits for a GPU.
    """

    def __init__(
        self, folder: Path, epoch_at: Callable[[int], float | None], store: CheckpointStore
    ) -> None:
        self.folder, self.epoch_at, self.store = folder, epoch_at, store
        self.started = self.written = 0.0
        self.first_step = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Start the clock: earlier steps of a resumed run do not count for the time left."""
        self.started, self.first_step = time.monotonic(), trainer.global_step
        self._write(trainer, pl_module, TRAINING)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write the first steps, then at most every MIN_SECONDS."""
        is_first = trainer.global_step <= self.first_step + 1
        if is_first or time.monotonic() - self.written >= MIN_SECONDS:
            self._write(trainer, pl_module, TRAINING)

    def on_validation_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Write that a validation runs."""
        self._write(trainer, pl_module, EVALUATING)

    def on_validation_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        """Show that a long validation proceeds."""
        if time.monotonic() - self.written >= MIN_SECONDS:
            self._write(trainer, pl_module, EVALUATING)

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Write the losses of the validation."""
        self._write(trainer, pl_module, TRAINING)

    def on_fit_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Write the last step: the trained model is compared with its base next."""
        self._write(trainer, pl_module, EVALUATING)

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Write how the run ends, and what it has saved: the process may not report it.

        A caller from Python or Ray may catch the error; SLURM may end a process that it requeues.
        """
        state = STOPPED if isinstance(exception, Interrupted) else FAILED
        message = printable(redact(str(exception)))
        self._write(trainer, pl_module, state, exit_code=exit_code(exception), message=message)

    def _write(self, trainer: L.Trainer, module: Any, state: str, **ending: Any) -> None:
        if not trainer.is_global_zero:
            return
        now, step, steps = time.monotonic(), trainer.global_step, trainer.max_steps
        self.written = now
        done, newest = step - self.first_step, self.store.newest_step()
        seconds = (now - self.started) / done if done > 0 and self.started else None
        update_status(
            self.folder,
            state=state,
            step=step,
            steps=steps,
            epoch=self.epoch_at(step),
            seconds_per_step=seconds,
            hours_left=None if ending or seconds is None else seconds * (steps - step) / 3600,
            checkpoint=None if newest is None else f"{self.store.folder.name}/step-{newest}",
            **{key: module.metrics.latest.get(name) for key, name in FIGURES.items()},
            **ending,
        )
