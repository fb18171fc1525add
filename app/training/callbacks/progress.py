"""Show the progress of a run: loss, learning rate, tokens per second and time left."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import lightning as L
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from app.process.logs import record, show
from common.text import duration

if TYPE_CHECKING:
    from app.training.metrics import Metrics

LINES_PER_RUN = 10
FIGURES = {
    "train/loss": "loss {:.4f}",
    "val/loss": "val {:.4f}",
    "speed/tokens_per_second": "{:,.0f} tok/s",
    "train/lr": "lr {:.1e}",
}
"""metrics shown of the latest row; a bar shows as many as fit into its line"""
BAR_WIDTH, TIME_WIDTH = 12, 7
STATUSES = ("validate", "train", "done", "stopped")


class ProgressBar(L.Callback):
    """Show a live bar on a terminal; in a file and the log ten lines and every validation."""

    def __init__(self) -> None:
        self.console = Console(file=sys.stdout)
        self.progress: Progress | None = None
        self.task = TaskID(0)
        self.started = 0.0
        self.first_step = 0
        self.next_line = 0.0
        self.unshown = ""  # the last validation, until a line shows it

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Open the bar on rank 0."""
        self.started = time.monotonic()
        if not trainer.is_global_zero or not self.console.is_terminal:
            return
        self.progress = Progress(
            TextColumn("{task.fields[what]}"),
            BarColumn(bar_width=BAR_WIDTH),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=self.console,
        )
        self.task = self.progress.add_task(
            "train", total=trainer.max_steps, what="validate", figures=""
        )
        self.progress.start()

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Start at the step of a resumed run: earlier steps do not count for the time left."""
        self.first_step = trainer.global_step
        if self.progress is not None:
            self.progress.update(self.task, completed=self.first_step)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Advance once per optimizer step."""
        if not trainer.is_global_zero:
            return
        step, total = trainer.global_step, trainer.max_steps
        if self.progress is not None:
            shown = figures(pl_module.metrics, self._room(total))
            self.progress.update(self.task, completed=step, what="train", figures=shown)
        if pl_module.metrics.latest_step == step and self.next_line <= step < total:
            self.next_line = step + total / LINES_PER_RUN
            seconds = (time.monotonic() - self.started) / max(1, step - self.first_step)
            left = f"{duration(seconds * (total - step))} left"
            self._write(f"step {step}/{total}  {figures(pl_module.metrics)}  {left}")
            self.unshown = ""

    def on_validation_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Show that a validation is running."""
        if self.progress is not None:
            self.progress.update(self.task, what="validate")

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Write the validation before this one, if the line of no step has shown it."""
        loss = pl_module.metrics.latest.get("val/loss")
        if trainer.is_global_zero and loss is not None:
            if self.unshown:
                self._write(self.unshown)
            self.unshown = f"step {trainer.global_step}/{trainer.max_steps}  val {loss:.4f}"

    def on_fit_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Close the bar; in a file, print the last step with its validation."""
        step, total = trainer.global_step, trainer.max_steps
        if trainer.is_global_zero and step:
            outcome = "done" if step >= total else "stopped early"
            self._write(f"step {step}/{total}  {figures(pl_module.metrics)}  {outcome}")
        self._close("done" if step >= total else "stopped")

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Close the bar before an error is printed."""
        self._close("stopped")

    def _write(self, line: str) -> None:
        """Write a line into the run's log, and print it where no bar shows the same."""
        record(line) if self.progress else show(line)

    def _room(self, total: int) -> int:
        """Return the width that the rest of the bar leaves for metrics, in characters."""
        counts = 2 * len(str(total)) + 1
        rest = (max(map(len, STATUSES)), BAR_WIDTH, counts, TIME_WIDTH)
        return self.console.width - sum(rest) - len(rest)

    def _close(self, status: str) -> None:
        if self.progress is not None:
            self.progress.update(self.task, what=status)
            self.progress.stop()
            self.progress = None


def figures(metrics: Metrics, room: int | None = None) -> str:
    """Return the latest metrics in one line, as many as fit into `room` characters."""
    shown = ((metrics.latest.get(name), form) for name, form in FIGURES.items())
    line = ""
    for text in (form.format(value) for value, form in shown if value is not None):
        longer = f"{line}  {text}" if line else text
        if room is not None and len(longer) > room:
            break
        line = longer
    return line
