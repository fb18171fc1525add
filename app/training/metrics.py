"""Metrics by data set: an exact row per optimizer step, without a host sync per step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from app.process.errors import TrainingFault, UserError
from app.training.checkpoint.schema import format_names
from app.training.log_files import CsvLogger
from app.training.machine import MachineStats
from app.training.nonfinite import StepWatch, nonfinite_metrics
from app.training.objective import losses_by_dataset
from app.training.routing import ExpertLoad

STATE_KEYS = (
    "dataset_names",
    "latest",
    "latest_step",
    "validations",
    "validated_step",
    "monitored",
    "best",
    "num_worse",
    "trained_tokens",
    "num_tokens",
    "train_seconds",
)
"""attributes of `Metrics` that a checkpoint holds"""
LOWER_IS_BETTER = ("loss", "perplexity", "bits_per_byte")
"""metrics; all others are better where they are higher"""
MAX_KEPT_ROWS = 100_000
"""validation rows whose losses a checkpoint holds; a resumed run has no intervals of more"""


def is_measured_at(step: int, every_steps: int, interval: int) -> bool:
    """Tell whether the validation after `step` is the first since a multiple of `every_steps`.

    `interval`: steps between validations.
    """
    return step == 0 or step // every_steps > (step - interval) // every_steps


@dataclass(slots=True)
class StepRecord:
    """One optimizer step, on the device until its block is written."""

    step: int
    lr: float
    grad_norm: Tensor
    sums: Tensor
    """[3, data sets]: weighted losses, weights, trained tokens, of this rank"""
    num_tokens: int
    """tokens of this rank without padding"""
    is_scaled: bool
    """whether a loss scaler checks the gradients (fp16)"""
    losses: list[Tensor]
    """of this rank's micro-batches, each its share of the step's loss"""
    norm_differs: bool = False
    """whether the ranks have clipped by norms of their own; the row has their mean"""
    rank: int = 0
    num_ranks: int = 1
    loads: Tensor | None = None
    """[layers x experts]: tokens that each expert was given, of this rank; None without experts"""


class Metrics:
    """Collect steps and write them in blocks: one reduction and one copy to the host per block.

    `watch` checks each step that is written. A skipped step's row has the loss and the norm for
    which it was skipped: nan or inf.
    """

    def __init__(
        self,
        dataset_names: list[str],
        loggers: Sequence[Any],
        every_steps: int,
        watch: StepWatch | None = None,
        monitor: str = "val/loss",
    ) -> None:
        self.dataset_names = dataset_names
        self.loggers = loggers
        self.every_steps = every_steps
        self.watch = watch or StepWatch()
        self.waiting: list[StepRecord] = []
        self.latest: dict[str, float] = {}
        self.latest_step = -1
        self.validations: list[dict[str, float]] = []
        self.validated_step = -1
        self.monitor = monitor
        self.measured: dict[str, float] = {}
        """of tasks and answers, at the latest validation"""
        self.monitored: list[float] = []
        """its value at the latest validation, lower is better; none where it was not measured"""
        self.best: list[float] = []
        """the lowest of them, if there is one"""
        self.num_worse = 0
        """measurements of it since the best one"""
        self.row_losses: list[Tensor | None] = [None, None]
        """weighted losses and weights of every validation row [2, rows], before the first step and
        after the last; None of what was not measured, or is too long for a checkpoint"""
        self.trained_tokens = [0.0] * len(dataset_names)
        self.num_tokens = 0
        self.train_seconds = 0.0
        self._block_started: float | None = None
        self.expert_load: ExpertLoad | None = None
        self.machine: MachineStats | None = None

    def add_machine(self, machine: MachineStats) -> None:
        """Write what the run takes of its machine in each block's last row."""
        self.machine = machine
        self._add_columns(machine.names)

    def add_experts(self, load: ExpertLoad) -> None:
        """Write the load of experts in each step's row."""
        self.expert_load = load
        self._add_columns(load.names)

    def add_measurements(self, names: Sequence[str]) -> None:
        """Write figures of tasks and answers in the rows of validations."""
        self._add_columns(names)

    def _add_columns(self, names: Sequence[str]) -> None:
        for logger in self.loggers:
            if isinstance(logger, CsvLogger):
                logger.columns += names

    def resume_clock(self) -> None:
        """Start the training clock, or continue it after a validation."""
        if self._block_started is None:
            self._block_started = time.monotonic()
            if self.machine is not None:
                self.machine.start()

    def add(self, record: StepRecord, reduce: Callable[[Tensor], Tensor]) -> None:
        """Add a step; write the block when it is full. `reduce` sums a tensor over all ranks."""
        self.waiting.append(record)
        # The first step is written at once: it shows whether the run is healthy.
        if record.step == 1 or record.step % self.every_steps == 0:
            self.flush(reduce)

    def flush(self, reduce: Callable[[Tensor], Tensor], *, pause: bool = False) -> None:
        """Write the waiting steps; TrainingFault if `watch` finds one that may not be skipped."""
        seconds = self._take_seconds(pause)
        if not self.waiting:
            return
        counts = torch.tensor([float(record.num_tokens) for record in self.waiting])
        sums = torch.stack([record.sums for record in self.waiting])
        parts = [sums.flatten(1), counts.to(sums).unsqueeze(1)]
        loads = [record.loads for record in self.waiting if record.loads is not None]
        if loads:
            parts.append(torch.stack(loads))
        sums = reduce(torch.cat(parts, dim=1)).cpu()
        norms = torch.stack([record.grad_norm for record in self.waiting])
        if self.waiting[0].norm_differs:
            norms = reduce(norms) / self.waiting[0].num_ranks
        num_sums = 3 * len(self.dataset_names)
        block_tokens = int(sums[:, num_sums].sum().item())
        self.num_tokens += block_tokens
        rate = block_tokens / max(seconds, 1e-9)
        last = self.waiting[-1]
        of_machine = {} if self.machine is None else self.machine.metrics(seconds, rate)

        for record, row, norm in zip(self.waiting, sums, norms.tolist(), strict=True):
            by_dataset = row[:num_sums].view(3, -1)
            metrics = losses_by_dataset(by_dataset, self.dataset_names, "train")
            self.trained_tokens = [
                before + now
                for before, now in zip(self.trained_tokens, by_dataset[2].tolist(), strict=True)
            ]
            metrics |= {
                "train/lr": record.lr,
                "train/grad_norm": norm,
                "speed/tokens_per_second": rate,
            }
            if loads and self.expert_load is not None:
                metrics |= self.expert_load.figures(row[num_sums + 1 :])
            metrics |= of_machine if record is last else {}
            self.write(record.step, metrics)
            self.watch.check(record, metrics, reduce)
        self.waiting = []

    def add_validation(
        self, step: int, sums: Tensor, measured: Mapping[str, float] | None = None
    ) -> None:
        """Write a validation's exact losses; `sums` [3, data sets] is over all ranks.

        `measured`: figures of tasks and answers, where they were asked.

        TrainingFault if one is not finite: no checkpoint could be ranked by it.
        """
        metrics = losses_by_dataset(sums.cpu(), self.dataset_names, "val")
        self.validations.append(metrics)
        self.validated_step = step
        self.measured = dict(measured or {})
        value = self.monitored_at(step)
        self.monitored = [value] if value is not None and math.isfinite(value) else []
        if self.monitored and self.monitored < (self.best or [math.inf]):
            self.best, self.num_worse = self.monitored, 0
        elif self.monitored:
            self.num_worse += 1
        self.write(step, metrics | self.measured)
        if bad := nonfinite_metrics(metrics, "val/loss/"):
            raise TrainingFault(
                f"validation after step {step}: loss {metrics['val/loss']} (of {', '.join(bad)}); "
                "lower optimizer.lr, or check the validation rows"
            )

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Write one row to every logger."""
        # Only finite values: checkpoints hold them as JSON.
        self.latest |= {name: value for name, value in metrics.items() if math.isfinite(value)}
        self.latest_step = step
        for logger in self.loggers:
            logger.log_metrics(metrics, step=step)

    def _take_seconds(self, pause: bool) -> float:
        now = time.monotonic()
        seconds = now - self._block_started if self._block_started is not None else 0.0
        self.train_seconds += seconds
        self._block_started = None if pause or self._block_started is None else now
        return seconds

    def summary(self) -> dict[str, float]:
        """Return figures of the whole run: tokens per second over all ranks, seconds, tokens."""
        return {
            "speed/tokens_per_second": self.num_tokens / max(self.train_seconds, 1e-9),
            "speed/train_seconds": self.train_seconds,
            "train/tokens": float(self.num_tokens),
            "train/skipped_steps": float(self.watch.num_skipped),
            **({} if self.machine is None else self.machine.summary()),
        } | {
            f"train/trained_tokens/{name}": count
            for name, count in zip(self.dataset_names, self.trained_tokens, strict=True)
        }

    def monitored_at(self, step: int) -> float | None:
        """Return what was monitored after `step`, lower is better; None if it was not measured."""
        if self.validated_step != step:
            return None
        value = (self.validations[-1] | self.measured).get(self.monitor)
        is_lower_better = self.monitor.split("/")[1] in LOWER_IS_BETTER
        return value if is_lower_better or value is None else -value

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON; RuntimeError while steps wait to be written."""
        if self.waiting:
            raise RuntimeError("steps wait to be written")
        counted = {name: getattr(self, name) for name in STATE_KEYS}
        rows = [
            [] if one is None or one.shape[1] > MAX_KEPT_ROWS else one.tolist()
            for one in self.row_losses
        ]
        return counted | {"skipped_steps": self.watch.num_skipped, "row_losses": rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`; UserError if the data sets have other names."""
        if state["dataset_names"] != self.dataset_names:
            raise UserError(
                f"resume: the run's data sets were named {format_names(state['dataset_names'])}"
                f", now they are {', '.join(self.dataset_names)}; restore the names with "
                "data.datasets=[{name: ...}], or start a new run with resume=never"
            )
        for name in STATE_KEYS:
            if name in state:  # an earlier version monitored nothing
                setattr(self, name, state[name])
        self.watch.num_skipped = state["skipped_steps"]
        rows = state.get("row_losses", [[], []])  # of an earlier version without them
        self.row_losses = [torch.tensor(one, dtype=torch.double) if one else None for one in rows]
