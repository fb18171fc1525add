"""Show and record how a run goes: progress, status.json, heartbeats, figures of the machine."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from app.process.heartbeat import ENDED, send_heartbeat, send_to_supervisor, start_heartbeat
from app.process.logs import record, show
from app.process.peers import Peers, start_peers
from app.process.status import EVALUATING, FAILED, STOPPED, TRAINING, update_status
from app.training.checkpoint.store import CheckpointStore
from app.training.machine import MachineStats, open_gpu_stats
from app.training.metrics import Metrics
from common.errors import Interrupted, exit_code
from common.redaction import redact
from common.text import duration, printable

_LINES_PER_RUN = 10
_BAR_FIGURES = {
    "train/loss": "loss {:.4f}",
    "val/loss": "val {:.4f}",
    "speed/tokens_per_second": "{:,.0f} tok/s",
    "train/lr": "lr {:.1e}",
}
"""metrics shown of the latest row; a bar shows as many as fit into its line"""
BAR_WIDTH, TIME_WIDTH = 12, 7
_STATUSES = ("validate", "train", "done", "stopped")
_MIN_SECONDS = 5.0
"""shortest time between two writes while the state stays: each one waits for the disk"""
_STATUS_FIGURES = {
    "loss": "train/loss",
    "val_loss": "val/loss",
    "tokens_per_second": "speed/tokens_per_second",
}
"""key in status.json -> metric, of which the latest value is written"""


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
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not trainer.is_global_zero:
            return
        step, total = trainer.global_step, trainer.max_steps
        if self.progress is not None:
            shown = figures(pl_module.metrics, self._room(total))
            self.progress.update(self.task, completed=step, what="train", figures=shown)
        if pl_module.metrics.latest_step == step and self.next_line <= step < total:
            self.next_line = step + total / _LINES_PER_RUN
            seconds = (time.monotonic() - self.started) / max(1, step - self.first_step)
            left = f"{duration(seconds * (total - step))} left"
            self._write(f"step {step}/{total}  {figures(pl_module.metrics)}  {left}")
            self.unshown = ""

    def on_validation_start(self, trainer: L.Trainer, pl_module: Any) -> None:
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
        self._close("stopped")

    def _write(self, line: str) -> None:
        """Write a line into the run's log, and print it where no bar shows the same."""
        record(line) if self.progress else show(line)

    def _room(self, total: int) -> int:
        """Return the width that the rest of the bar leaves for metrics, in characters."""
        counts = 2 * len(str(total)) + 1
        rest = (max(map(len, _STATUSES)), BAR_WIDTH, counts, TIME_WIDTH)
        return self.console.width - sum(rest) - len(rest)

    def _close(self, status: str) -> None:
        if self.progress is not None:
            self.progress.update(self.task, what=status)
            self.progress.stop()
            self.progress = None


def figures(metrics: Metrics, room: int | None = None) -> str:
    """Return the latest metrics in one line, as many as fit into `room` characters."""
    shown = ((metrics.latest.get(name), form) for name, form in _BAR_FIGURES.items())
    line = ""
    for text in (form.format(value) for value, form in shown if value is not None):
        longer = f"{line}  {text}" if line else text
        if room is not None and len(longer) > room:
            break
        line = longer
    return line


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
        is_first = trainer.global_step <= self.first_step + 1
        if is_first or time.monotonic() - self.written >= _MIN_SECONDS:
            self._write(trainer, pl_module, TRAINING)

    def on_validation_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._write(trainer, pl_module, EVALUATING)

    on_fit_end = on_validation_start  # the trained model is compared with its base next

    def on_validation_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        if time.monotonic() - self.written >= _MIN_SECONDS:
            self._write(trainer, pl_module, EVALUATING)

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._write(trainer, pl_module, TRAINING)

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
            **{key: module.metrics.latest.get(name) for key, name in _STATUS_FIGURES.items()},
            **ending,
        )


class Heartbeat(L.Callback):
    """Send a heartbeat with every micro-batch of training and validation."""

    def __init__(self, folder: Path, peers: Peers | None = None) -> None:
        """`peers`: checks the other ranks if no supervisor does; they are connected by `setup`."""
        self.folder = folder
        self.peers = peers

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        if self.peers is not None:
            start_peers(self.peers)

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Start; before the first validation, which a resumed run does not have.

        Pauses only count from the first heartbeat on, and none is sent here: a stream may take long
        to reach the step at which the run resumes.
        """
        if self.peers is None:
            start_heartbeat(self.folder, trainer.global_rank)

    on_sanity_check_start = on_train_start

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        """Send a heartbeat, also before a step that may hang."""
        send_heartbeat(trainer.global_step)

    on_validation_batch_end = on_after_backward = on_train_batch_start

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        send_heartbeat(trainer.global_step)
        if self.peers is not None:
            self.peers.mark_trained()

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Let `exception` end this rank: writing the run's report and loggers may take long."""
        if self.peers is not None:
            self.peers.mark_failed()

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        send_to_supervisor(ENDED)
        if self.peers is not None:
            self.peers.mark_done()


class MachineStatsMonitor(L.Callback):
    """Measure the machine of rank 0, from the first step on.

    `peak_tokens_per_second`: training throughput of all GPUs if every FLOP of their datasheets
    were one of the model's; None if it is not known.
    """

    def __init__(self, folder: Path, peak_tokens_per_second: float | None = None) -> None:
        self.folder, self.peak_tokens_per_second = folder, peak_tokens_per_second

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if not trainer.is_global_zero:
            return
        profiler: Any = trainer.profiler
        device = trainer.strategy.root_device
        machine = MachineStats(
            self.folder,
            lambda: float(profiler.seconds),
            gpu=open_gpu_stats(device.index or 0) if device.type == "cuda" else None,
            peak_tokens_per_second=self.peak_tokens_per_second,
        )
        pl_module.metrics.add_machine(machine)
