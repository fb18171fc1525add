"""Callbacks of a run: checks at its start, and what shows and records how it goes.

The checks: equal values on all ranks, a gradient for every adapter matrix. The monitors: progress,
status.json, heartbeats, figures of the machine.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import platform
import re
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.profilers import PassThroughProfiler
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from torch import Tensor

from app.model.adapter import TrainableWeight, adapter_matrices
from app.model.layers import pattern_without
from app.process.heartbeat import ENDED, send_heartbeat, send_to_supervisor, start_heartbeat
from app.process.logs import record, show
from app.process.peers import Peers, start_peers
from app.process.signals import mark_waiting_for_data
from app.process.status import EVALUATING, FAILED, STOPPED, TRAINING, update_status
from app.training.checkpoint.store import CheckpointStore
from app.training.machine import MachineStats, open_gpu_stats
from app.training.metrics import Metrics
from common.errors import Interrupted, TrainingFault, UserError, exit_code
from common.installation import ROOT
from common.redaction import redact
from common.text import duration, printable

if TYPE_CHECKING:
    from app.config import TrainConfig

log = logging.getLogger(__name__)

_PER_PROCESS = ("output", "supervise", "resume", "resume_allow", "faults")
"""settings of a single process or start of the run, which may differ"""
_LOCATIONS = ("path", "tokenizer_path", "chat_template", "cache_dir")
"""settings that may differ between machines: files are compared by content, not by path"""
_SOURCES = ("app", "common", "data_modules", "conf")
"""source folders of this program"""
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


def program_values(versions: Mapping[str, str]) -> dict[str, Any]:
    """Return code and versions by the names that an error shows; `versions`: of libraries."""
    digest = hashlib.sha256()
    for package in _SOURCES:
        for file in sorted((ROOT / package).rglob("*")):
            if file.suffix in (".py", ".yaml"):
                digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return {
        "code (another version of this program, or a file that was edited)": digest.hexdigest(),
        "versions of libraries": dict(versions),
        "versions of Python": platform.python_version(),
    }


def rank_invariant_values(config: TrainConfig, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that must be the same on all ranks, by the names that an error shows.

    `facts`: those of the run's manifest.
    """
    settings = {
        f"settings of {name}": _without_locations(value)
        for name, value in dataclasses.asdict(config).items()
        if name not in _PER_PROCESS
    }
    # `auto` is the same setting on all ranks, but may resolve to different strategies.
    strategy = settings.pop("settings of strategy"), facts["strategy"]
    data = [*facts["data"], *facts["test_data"]]
    return settings | {
        "files of the base model": facts["base"]["weights"] or facts["base"]["path"],
        "rows": [file["sha256"] or file["path"] for file in data],
        "tokens": facts.get("tokens_sha256"),
        "tokenizer files": facts["tokenizer_sha256"],
        "chat template": facts["template_sha256"],
        "plan of steps": [facts[name] for name in ("total_steps", "global_batch")],
        "precision": facts["precision"],
        "strategy": strategy,
    }


def _without_locations(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: _without_locations(part) for name, part in value.items() if name not in _LOCATIONS
        }
    if isinstance(value, list):
        return [_without_locations(part) for part in value]
    return value


class SameOnAllRanks(L.Callback):
    """Compare rank-invariant values with those of rank 0; UserError if they differ."""

    def __init__(self, values: Mapping[str, Any], program: Mapping[str, Any]) -> None:
        """`program`: code and versions, compared first because they determine the other values."""
        self.values, self.program = values, program

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Compare hashes after the ranks have connected and before weights are loaded."""
        for values in (self.program, self.values):
            if different := _different(trainer, values):
                raise UserError(
                    [
                        f"rank {rank} and rank 0 have different {', '.join(names)}; start all "
                        "ranks with the same command, with the same files on every machine"
                        for rank, names in different.items()
                    ]
                )
        device = trainer.strategy.root_device
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        ranks = ", ".join(map(str, _different(trainer, {"GPU": gpu})))
        if ranks and trainer.is_global_zero:
            log.warning(
                "ranks %s have another GPU than rank 0 (%s): the slowest, and the one with least "
                "memory, limit all",
                *(ranks, gpu),
            )


def _different(trainer: L.Trainer, values: Mapping[str, Any]) -> dict[int, list[str]]:
    """Return the names of the values that are not those of rank 0, by the ranks that have them."""
    texts = (json.dumps(value, sort_keys=True, default=str).encode() for value in values.values())
    # 63 bits: a tensor has signed integers.
    hashes = [int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1 for text in texts]
    tensor = torch.tensor(hashes, dtype=torch.int64, device=trainer.strategy.root_device)
    rank0, *others = trainer.strategy.all_gather(tensor).tolist()
    different = {
        rank: [name for name, first, own in zip(values, rank0, other, strict=True) if first != own]
        for rank, other in enumerate(others, start=1)
    }
    return {rank: names for rank, names in different.items() if names}


class GradientCheck(L.Callback):
    """Stop a run whose first optimizer step leaves an adapter matrix without a gradient.

    Such a matrix, for example in a vision tower of a model trained on text, would be saved
    untrained. The experts of a layer count as one: the tokens of a step need not reach all of them.
    """

    def __init__(self) -> None:
        self._weights: list[TrainableWeight] = []
        self._is_reached: list[Tensor] = []
        """one per weight: whether hooks have received a nonzero gradient"""
        self._hooks: list[Any] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Register hooks if the strategy does not keep gradients with their weights."""
        self._weights = adapter_matrices(pl_module.model)
        device = trainer.strategy.root_device
        self._is_reached = [torch.zeros((), device=device) for _ in self._weights]
        if pl_module.strategy.keeps_gradients:
            return
        self._hooks = [
            weight.parameter.register_hook(partial(_record, is_reached))
            for weight, is_reached in zip(self._weights, self._is_reached, strict=True)
        ]

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: Any, optimizer: torch.optim.Optimizer
    ) -> None:
        """Check the first step; UserError on all ranks, with the target_modules to type."""
        if not self._weights:
            return
        for hook in self._hooks:
            hook.remove()
        strategy: Any = trainer.strategy
        if strategy.keeps_gradients:
            for weight, is_reached in zip(self._weights, self._is_reached, strict=True):
                if (gradient := strategy.gradient(weight.parameter)) is not None:
                    _record(is_reached, gradient)
        counts = strategy.reduce(torch.stack(self._is_reached), reduce_op="sum").tolist()
        weights, self._weights, self._is_reached = self._weights, [], []
        _check_gradients(weights, [count > 0 for count in counts])


def _record(is_reached: Tensor, gradient: Tensor) -> None:
    is_reached += gradient.detach().any().to(is_reached.device)


def _check_gradients(weights: list[TrainableWeight], is_reached: list[bool]) -> None:
    """Raise UserError naming the matrices without a gradient; TrainingFault if none has one."""
    places = {_place(w) for w, reached in zip(weights, is_reached, strict=True) if reached}
    without = [weight for weight in weights if _place(weight) not in places]
    if not without:
        return
    num_modules = len({weight.module for weight in weights})
    if not places:
        raise TrainingFault(
            f"step 1: none of the {num_modules} adapted matrices got a gradient: the "
            "loss of this step does not depend on the adapter; check the trained tokens (python "
            "-m app.preview) and adapter.alpha"
        )
    names = list(dict.fromkeys(weight.module for weight in without))
    reached = {weight.module for weight in weights} - set(names)
    pattern = pattern_without(sorted(reached), names)
    fix = (
        f"adapter.target_modules='{pattern}'" if pattern else "adapter.target_modules without them"
    )
    raise UserError(
        f"step 1: {len(names)} of {num_modules} adapted matrices got no gradient, "
        f"the first is {names[0]}: the training data does not pass through them, and they would be "
        f"saved untrained; type {fix}"
    )


def _place(weight: TrainableWeight) -> str:
    place, expert, inside = weight.module.partition("expert")
    return place + expert + re.sub(r"\d+", "*", inside)


class ProgressBar(L.Callback):
    """Show a live bar on a terminal; in a file and the log ten lines and every validation."""

    def __init__(self) -> None:
        self.console = Console(file=sys.stdout)
        self.progress: Progress | None = None
        self.task = TaskID(0)
        self.started: float | None = None
        self.first_step = 0
        self.next_line = 0.0
        self.unshown = ""  # the last validation, until a line shows it

    def seconds_per_step(self, step: int) -> float | None:
        """Return the time that a step takes; earlier steps of a resumed run do not count."""
        if self.started is None or step <= self.first_step:
            return None
        return (time.monotonic() - self.started) / (step - self.first_step)

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
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
        self.started, self.first_step = time.monotonic(), trainer.global_step
        if self.progress is not None:
            self.progress.update(self.task, completed=self.first_step)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        if not trainer.is_global_zero:
            return
        step, total = trainer.global_step, trainer.max_steps
        if self.progress is not None:
            texts = (max(map(len, _STATUSES)), BAR_WIDTH, 2 * len(str(total)) + 1, TIME_WIDTH)
            room = self.console.width - sum(texts) - len(texts)
            shown = figures(pl_module.metrics, room)
            self.progress.update(self.task, completed=step, what="train", figures=shown)
        if pl_module.metrics.latest_step == step and self.next_line <= step < total:
            self.next_line = step + total / _LINES_PER_RUN
            seconds = self.seconds_per_step(step) or 0.0
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
        self,
        folder: Path,
        epoch_at: Callable[[int], float | None],
        store: CheckpointStore,
        progress: ProgressBar,
    ) -> None:
        """`progress`: knows how long a step takes."""
        self.folder, self.epoch_at, self.store = folder, epoch_at, store
        self.progress, self.written = progress, 0.0

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        is_first = trainer.global_step <= self.progress.first_step + 1
        if is_first or time.monotonic() - self.written >= _MIN_SECONDS:
            self._write(trainer, pl_module, TRAINING)

    def on_validation_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._write(trainer, pl_module, EVALUATING)

    on_fit_end = on_validation_start  # the trained model is compared with its base next

    def on_validation_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        if time.monotonic() - self.written >= _MIN_SECONDS:
            self._write(trainer, pl_module, EVALUATING)

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._write(trainer, pl_module, TRAINING)

    on_validation_end = on_train_start

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
        self.written, newest = time.monotonic(), self.store.newest_step()
        step, steps = trainer.global_step, trainer.max_steps
        seconds = self.progress.seconds_per_step(step)
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
            self.peers.has_trained = True

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Let `exception` end this rank: writing the run's report and loggers may take long."""
        if self.peers is not None:
            self.peers.has_failed = True

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        send_to_supervisor(ENDED)
        if self.peers is not None:
            self.peers.is_done = True


class FetchProfiler(PassThroughProfiler):
    """Measure how long training waits for batches, and tell the signal handlers when it waits.

    A profiler, because Lightning has no hook around the fetch of a batch. Fetches of validation
    batches are not counted, as validations are not counted as training time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        """time that the training loop has waited for batches so far"""
        self._fetch_started: float | None = None

    def start(self, action_name: str) -> None:
        if action_name.endswith("_next"):
            mark_waiting_for_data(True)
            if "train" in action_name:
                self._fetch_started = time.perf_counter()

    def stop(self, action_name: str) -> None:
        if action_name.endswith("_next"):
            if self._fetch_started is not None:
                self.seconds += time.perf_counter() - self._fetch_started
                self._fetch_started = None
            mark_waiting_for_data(False)


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
