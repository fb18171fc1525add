"""Metrics by data set: an exact row per optimizer step, without a host sync per step."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from app.training.checkpoint.schema import format_names
from app.training.loggers import CsvLogger
from app.training.machine import MachineStats
from app.training.nonfinite import StepWatch, nonfinite_metrics
from app.training.objective.objective import losses_by_dataset
from app.training.objective.pairs import find_warning
from app.training.routing import ExpertLoad
from app.training.run_documents import is_lower_better
from common.errors import TrainingFault, UserError

log = logging.getLogger(__name__)

_STATE_KEYS = (
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
"""attributes of `Metrics` that are saved in checkpoints"""
_MAX_KEPT_ROWS = 100_000
"""most validation rows whose losses are saved in checkpoints; with more rows, a resumed run reports
no confidence intervals"""


def is_measured_at(step: int, every_steps: int, interval: int) -> bool:
    """Return whether the validation after `step` is the first since a multiple of `every_steps`.

    `interval`: steps between validations.
    """
    return step == 0 or step // every_steps > (step - interval) // every_steps


@dataclass(slots=True)
class StepRecord:
    """One optimizer step; its tensors stay on the device until its block is written."""

    step: int
    lr: float
    grad_norm: Tensor
    sums: Tensor
    """weighted losses, weights, trained tokens and figures of this rank: [3 + k, data sets]"""
    num_tokens: int
    """tokens of this rank, without padding"""
    is_scaled: bool
    """whether a loss scaler checks the gradients (fp16)"""
    losses: list[Tensor]
    """contributions of this rank's micro-batches to the loss of the step"""
    norm_differs: bool = False
    """whether each rank clips by its own norm; the row then has the mean of the norms"""
    rank: int = 0
    num_ranks: int = 1
    loads: Tensor | None = None
    """tokens routed to each expert on this rank: [layers x experts]; None without experts"""


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstLoss:
    """The loss that the first step has if the model still equals the base."""

    value: float
    tolerance: float
    """largest difference that rounding explains, relative to the value"""
    of: str
    """the setting that it follows from, such as objective=dpo"""

    def check(self, loss: float) -> None:
        """Raise TrainingFault if the loss of the first step is another one."""
        if abs(loss - self.value) > self.tolerance * self.value:
            raise TrainingFault(
                f"step 1: the loss of {self.of} is {loss:.6g}, but {self.value:.6g} as long as the "
                "model equals the base: its new adapter changes outputs, or attention, kernels or "
                "dropout give other results in training; try trainer.kernels=torch attention=sdpa, "
                "and report it"
            )


class Metrics:
    """Collect steps and write them in blocks: one reduction and one copy to the host per block.

    `watch` checks each step that is written. The row of a skipped step has the nonfinite loss or
    gradient norm for which it was skipped.
    """

    def __init__(
        self,
        dataset_names: list[str],
        loggers: Sequence[Any],
        every_steps: int,
        watch: StepWatch | None = None,
        monitor: str = "val/loss",
        figures: Sequence[str] = (),
        first_loss: FirstLoss | None = None,
    ) -> None:
        self.dataset_names = dataset_names
        self.first_loss = first_loss
        self.loggers = loggers
        self.figures = figures
        """names of what the objective measures besides its loss"""
        self.every_steps = every_steps
        self.watch = watch or StepWatch()
        self.pending: list[StepRecord] = []
        self.latest: dict[str, float] = {}
        self.latest_step = -1
        self.validations: list[dict[str, float]] = []
        self.validated_step = -1
        self.monitor = monitor
        self.measured: dict[str, float] = {}
        """metrics of tasks and generations at the latest validation"""
        self.monitored: list[float] = []
        """value of the monitored metric at the latest validation, negated if higher is better;
        empty if it was not measured"""
        self.best: list[float] = []
        """lowest value of `monitored` so far; empty if there is none"""
        self.num_worse = 0
        """measurements of the monitored metric since the best one"""
        self.row_losses: list[Tensor | None] = [None, None]
        """weighted losses and weights of every validation row [2, rows], before the first step and
        after the last; None if not measured, or too long for the checkpoint of a resumed run"""
        self.trained_tokens = [0.0] * len(dataset_names)
        self.num_tokens = 0
        self.num_positions = self.num_padded = 0
        """positions of this rank's micro-batches since the start or resume, and those of padding"""
        self.train_seconds = 0.0
        self._block_started: float | None = None
        self.expert_load: ExpertLoad | None = None
        self.machine: MachineStats | None = None
        self.add_columns(
            [
                "/".join(filter(None, (phase, figure, name)))
                for phase in ("train", "val")
                for figure in figures
                for name in ("", *dataset_names)
            ]
        )

    def add_machine(self, machine: MachineStats) -> None:
        """Log the machine's statistics in the last row of each block."""
        self.machine = machine
        self.add_columns(machine.names)

    def add_experts(self, load: ExpertLoad) -> None:
        """Log the expert load in the row of each step."""
        self.expert_load = load
        self.add_columns(load.names)

    def add_columns(self, names: Sequence[str]) -> None:
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
        self.pending.append(record)
        # The first step is written immediately: it shows whether the run is healthy.
        if record.step == 1 or record.step % self.every_steps == 0:
            self.flush(reduce)

    def flush(self, reduce: Callable[[Tensor], Tensor], *, pause: bool = False) -> None:
        """Write the pending steps; TrainingFault if `watch` finds one that may not be skipped."""
        seconds = self._take_seconds(pause)
        if not self.pending:
            return
        counts = torch.tensor([float(record.num_tokens) for record in self.pending])
        sums = torch.stack([record.sums for record in self.pending])
        parts = [sums.flatten(1), counts.to(sums).unsqueeze(1)]
        loads = [record.loads for record in self.pending if record.loads is not None]
        if loads:
            parts.append(torch.stack(loads))
        sums = reduce(torch.cat(parts, dim=1)).cpu()
        norms = torch.stack([record.grad_norm for record in self.pending])
        if self.pending[0].norm_differs:
            norms = reduce(norms) / self.pending[0].num_ranks
        num_sums = self.pending[0].sums.numel()
        block_tokens = int(sums[:, num_sums].sum().item())
        self.num_tokens += block_tokens
        rate = block_tokens / max(seconds, 1e-9)
        last = self.pending[-1]
        machine_metrics = {} if self.machine is None else self.machine.metrics(seconds, rate)

        for record, row, norm in zip(self.pending, sums, norms.tolist(), strict=True):
            by_dataset = row[:num_sums].view(-1, len(self.dataset_names))
            metrics = losses_by_dataset(by_dataset, self.dataset_names, "train", self.figures)
            self.trained_tokens = [
                count + added
                for count, added in zip(self.trained_tokens, by_dataset[2].tolist(), strict=True)
            ]
            metrics |= {
                "train/lr": record.lr,
                "train/grad_norm": norm,
                "speed/tokens_per_second": rate,
            }
            if loads and self.expert_load is not None:
                metrics |= self.expert_load.metrics(row[num_sums + 1 :])
            metrics |= machine_metrics if record is last else {}
            self.write(record.step, metrics)
            self.watch.check(record, metrics, reduce)
            if record.step == 1 and self.first_loss is not None:
                self.first_loss.check(metrics["train/loss"])
        self.pending = []

    def add_validation(
        self, step: int, sums: Tensor, measured: Mapping[str, float] | None = None
    ) -> None:
        """Write the exact losses of a validation; `sums` [3 + k, data sets] covers all ranks.

        `measured`: metrics of tasks and generations, if they were evaluated. TrainingFault if a
        loss is not finite: no checkpoint could be ranked by it.
        """
        metrics = losses_by_dataset(sums.cpu(), self.dataset_names, "val", self.figures)
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
        if (warning := find_warning(self.validations)) is not None:
            log.warning("validation after step %d: %s", step, warning)
        if bad := nonfinite_metrics(metrics, "val/loss/"):
            raise TrainingFault(
                f"validation after step {step}: loss {metrics['val/loss']} (of {', '.join(bad)}); "
                "lower optimizer.lr, or check the validation rows"
            )

    def write(self, step: int, metrics: dict[str, float]) -> None:
        # Only finite values: checkpoints save them as JSON.
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
        """Return metrics of the whole run: tokens per second over all ranks, seconds, tokens."""
        return {
            "speed/tokens_per_second": self.num_tokens / max(self.train_seconds, 1e-9),
            "speed/train_seconds": self.train_seconds,
            "train/tokens": float(self.num_tokens),
            "train/skipped_steps": float(self.watch.num_skipped),
            **(
                {"speed/padding": self.num_padded / self.num_positions}
                if self.num_positions
                else {}
            ),
            **({} if self.machine is None else self.machine.summary()),
        } | {
            f"train/trained_tokens/{name}": count
            for name, count in zip(self.dataset_names, self.trained_tokens, strict=True)
        }

    def monitored_at(self, step: int) -> float | None:
        """Return the monitored metric after `step`, negated if higher is better, or None."""
        if self.validated_step != step:
            return None
        value = (self.validations[-1] | self.measured).get(self.monitor)
        return None if value is None else self.as_measured(value)

    def as_measured(self, value: float) -> float:
        """Negate a value of the monitored metric if higher is better; undoes itself."""
        return value if is_lower_better(self.monitor) else -value

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON; RuntimeError if steps are not written yet."""
        if self.pending:
            raise RuntimeError("call flush() first: some steps are not written yet")
        state = {name: getattr(self, name) for name in _STATE_KEYS}
        rows = [
            [] if losses is None or losses.shape[1] > _MAX_KEPT_ROWS else losses.tolist()
            for losses in self.row_losses
        ]
        return state | {"skipped_steps": self.watch.num_skipped, "row_losses": rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`; UserError if the names of the data sets have changed."""
        if state["dataset_names"] != self.dataset_names:
            raise UserError(
                f"resume: the data sets of the run were named "
                f"{format_names(state['dataset_names'])}, now they are named "
                f"{', '.join(self.dataset_names)}; restore the names with "
                "data.datasets=[{name: ...}], or start a new run with resume=never"
            )
        for name in _STATE_KEYS:
            setattr(self, name, state[name])
        self.watch.num_skipped = state["skipped_steps"]
        self.row_losses = [
            torch.tensor(row, dtype=torch.double) if row else None for row in state["row_losses"]
        ]
