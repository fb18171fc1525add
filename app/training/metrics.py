"""Metrics by data set: an exact row per optimizer step, without a host sync per step; its checks.

A step whose loss or gradient norm is not finite is skipped on the device, before the optimizer, and
reported with its rows when its metrics are written. It changes no weight and no optimizer state;
the data and the schedule advance.
"""

from __future__ import annotations

import logging
import math
import re
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from app.model.experts import expert_modules
from app.process.launch import is_first_rank
from app.training.checkpoint.documents import format_names
from app.training.loggers import CsvLogger
from app.training.machine import MachineStats
from app.training.objective.objective import is_token, losses_by_dataset
from app.training.objective.pairs import find_warning
from app.training.run_documents import is_lower_better
from common.errors import TrainingFault, UserError
from common.installation import verb_command
from data_modules import Batch, StepRow

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
MAX_OVERFLOWS = 32
"""consecutive steps that a loss scaler may skip: each halves its scale, which starts at 2**16"""
SPIKE_WINDOW, MIN_SPIKE_STEPS = 64, 20
"""window of the running median and the fewest steps it needs; a longer window would reach back into
the steep start of a run, and with fewer steps one of few tokens looks like a spike"""
SPIKE_FACTOR, SPIKE_RISE = 3.0, 1.0
"""a spike exceeds this multiple of the median, and the median by this many nats: none of the 4,393
steps of a healthy run reached 1.5 times the median; losses near zero, of memorized rows, jump by
more"""
HIGH_SHARE, HIGH_FACTOR = 0.9, 1.5
"""a spike also exceeds this quantile of the losses by this factor: if a tenth of the packs holds
harder rows, their loss is not a spike"""
_MIN_TOKEN_SHARE = 0.5
"""steps with less than this share of the median number of trained tokens are ignored"""
LEARNS_WITHIN, MIN_CHANGE, MIN_PART_STEPS = 3, 0.01, 8
"""a warning is logged if the loss changes by less than the share MIN_CHANGE within the first
1 / LEARNS_WITHIN of a run; means over at least MIN_PART_STEPS steps are compared"""
_MAX_ROWS = 5
"""rows listed in a message"""


def is_measured_at(step: int, every_steps: int, interval: int) -> bool:
    """Return whether the validation after `step` is the first since a multiple of `every_steps`.

    `interval`: steps between validations.
    """
    return step == 0 or step // every_steps > (step - interval) // every_steps


class ExpertLoad:
    """Count the tokens routed to each expert in training, on the device and without padding."""

    def __init__(self, model: torch.nn.Module) -> None:
        found = list(expert_modules(model))
        widest = max((module.num_experts for _, module in found), default=0)
        numbers = ((name, re.search(r"\.(\d+)\.", name)) for name, _ in found)
        self.layers = [number[1] if number else name for name, number in numbers]
        self._shape = (len(found), widest)
        self._counts: Tensor | None = None
        self._is_token: Tensor | None = None
        for place, (_, module) in enumerate(found):
            module.register_forward_pre_hook(partial(self._count, place), with_kwargs=True)

    @property
    def names(self) -> list[str]:
        """Names of the metrics: per layer, the largest load of an expert over the mean load."""
        return [f"experts/load_max/{layer}" for layer in self.layers]

    @contextmanager
    def counting(self, batch: Batch) -> Iterator[None]:
        """Count the forward pass inside the context, without the recomputed ones after it."""
        if self.layers:
            self._is_token = is_token(batch).flatten()
        try:
            yield
        finally:
            self._is_token = None

    def take(self) -> Tensor | None:
        """Return the token counts [layers x experts] since the last call; None without experts."""
        counts, self._counts = self._counts, None
        return None if counts is None else counts.flatten()

    def metrics(self, counts: Tensor) -> dict[str, float]:
        """Return the metrics of counts [layers x experts], summed over ranks, on the host."""
        by_layer = counts.view(self._shape)
        largest, mean = by_layer.amax(1), by_layer.mean(1).clamp(min=1e-9)
        return dict(zip(self.names, (largest / mean).tolist(), strict=True))

    def _count(
        self, place: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._is_token is None:
            return
        chosen = args[1] if len(args) > 1 else kwargs["top_k_index"]
        if self._counts is None:
            self._counts = torch.zeros(self._shape, dtype=torch.float64, device=chosen.device)
        counted = self._is_token.double().unsqueeze(1).expand_as(chosen)
        self._counts[place].scatter_add_(0, chosen.flatten(), counted.flatten())


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
        now = time.monotonic()
        seconds = 0.0 if self._block_started is None else now - self._block_started
        self.train_seconds += seconds
        self._block_started = None if pause or self._block_started is None else now
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

    def summary(self) -> dict[str, float]:
        """Return metrics of the whole run: tokens per second over all ranks, seconds, tokens."""
        return {
            "speed/tokens_per_second": self.num_tokens / max(self.train_seconds, 1e-9),
            "speed/train_seconds": self.train_seconds,
            "train/tokens": float(self.num_tokens),
            "train/skipped_steps": float(self.watch.num_skipped),
            **({"speed/padding": self.num_padded / n} if (n := self.num_positions) else {}),
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


def check_finite_state(step: int, *parts: Mapping[str, Tensor]) -> None:
    """Raise TrainingFault if a tensor of the checkpoint of `step` is not finite.

    One number is read per device.
    """
    by_device: dict[torch.device, dict[str, Tensor]] = {}
    for part in parts:
        for name, tensor in part.items():
            if tensor.is_floating_point() and tensor.numel():
                by_device.setdefault(tensor.device, {})[name] = tensor
    for tensors in by_device.values():
        # Minimum and maximum are NaN if any value is, and need no memory.
        ranges = [torch.stack(tensor.detach().aminmax()).double() for tensor in tensors.values()]
        found = torch.stack(ranges).isfinite().all(1).tolist()
        bad = [name for name, is_finite in zip(tensors, found, strict=True) if not is_finite]
        if bad:
            more = f", and so have {len(bad) - 1:,} more tensors" if len(bad) > 1 else ""
            raise TrainingFault(
                f"step {step}: {bad[0]} has non-finite values{more}; no checkpoint "
                "is saved, earlier ones are kept; lower optimizer.lr and resume "
                "from the last one with resume=auto 'resume_allow=[lr]'"
            )


def nonfinite_metrics(metrics: Mapping[str, float], prefix: str) -> list[str]:
    """Return the metrics that start with `prefix` and are not finite, without the prefix."""
    return [
        name.removeprefix(prefix)
        for name, value in metrics.items()
        if name.startswith(prefix) and not math.isfinite(value)
    ]


class StepWatch:
    """Check steps as they are written: warn of skipped steps, loss spikes and a loss that does not
    change, and stop the run after too many skipped steps.

    `rows_of` returns the rows of a step, counted from 1; none if they are not known. `total_steps`
    and `vocab_size` are those of the run and the model; 0 disables the check for learning.
    """

    def __init__(
        self,
        max_skipped_steps: int = 0,
        rows_of: Callable[[int], Iterable[StepRow]] = lambda step: (),
        *,
        total_steps: int = 0,
        vocab_size: int = 0,
    ) -> None:
        self.max_skipped_steps, self.rows_of = max_skipped_steps, rows_of
        self._first_part, self._vocab_size = total_steps // LEARNS_WITHIN, vocab_size
        self._first_losses: list[float] = []
        self.num_skipped = 0
        """nonfinite steps of the run so far"""
        self._num_overflows = 0
        self._before: dict[str, deque[tuple[float, float]]] = {}
        """loss and trained tokens of the previous steps, by data set"""
        self._no_warning_before = 0

    def check(
        self, record: StepRecord, metrics: Mapping[str, float], reduce: Callable[[Tensor], Tensor]
    ) -> None:
        """Check a step's metrics over all ranks; every rank calls this for every step.

        TrainingFault at one nonfinite step more than may be skipped.
        """
        loss, norm = metrics.get("train/loss", 0.0), metrics["train/grad_norm"]
        self._num_overflows = 0 if math.isfinite(norm) else self._num_overflows + 1
        if record.is_scaled and self._num_overflows > MAX_OVERFLOWS:
            raise TrainingFault(
                f"step {record.step}: gradient norm {norm}, as in the {MAX_OVERFLOWS} steps before "
                "it: all were skipped, and no loss scale is small enough; type "
                "trainer.precision=bf16 or fp32, or lower optimizer.lr"
            )
        # A loss scaler skips steps whose scaled gradients overflow: that is not an error.
        if math.isfinite(loss) and (math.isfinite(norm) or record.is_scaled):
            self._check_spikes(record.step, metrics)
            self._check_learning(record.step, loss)
            return
        self.num_skipped += 1
        what = f"step {record.step}: {self._describe(record, metrics, reduce)}"
        where = " on the ranks whose gradient norm is not finite" if record.norm_differs else ""
        if self.num_skipped > self.max_skipped_steps:
            allowed = self.max_skipped_steps
            after = f" (after {allowed} that trainer.max_skipped_steps={allowed} allows)"
            raise TrainingFault(
                f"{what}. The step was skipped{where}{after if allowed else ''}; check the rows, "
                f"lower optimizer.lr, or type trainer.max_skipped_steps={self.num_skipped} to "
                "skip such steps"
            )
        if is_first_rank():
            log.warning(
                f"{what}. The step is skipped{where}, {self.num_skipped} of "
                f"trainer.max_skipped_steps={self.max_skipped_steps}"
            )

    def _describe(
        self, record: StepRecord, metrics: Mapping[str, float], reduce: Callable[[Tensor], Tensor]
    ) -> str:
        """Return the values of a nonfinite step, and the rows that may have caused it."""
        loss, norm = metrics.get("train/loss"), metrics["train/grad_norm"]
        datasets = nonfinite_metrics(metrics, "train/loss/")
        of_datasets = f" (of {', '.join(datasets)})" if datasets else ""
        values = f"loss {loss}{of_datasets}, gradient norm {norm}"
        own = torch.stack(record.losses).isfinite().logical_not().float()
        is_bad = own.new_zeros(record.num_ranks, len(own))
        is_bad[record.rank] = own
        places = reduce(is_bad).nonzero().tolist()  # pairs of rank and micro-batch
        rows = list(self.rows_of(record.step))
        suspects = [
            row
            for row in rows
            if (not datasets or row.dataset in datasets)
            and (not places or [row.rank, row.micro_batch] in places)
        ]
        return f"{values}; {_listed(suspects or rows)}"

    def _check_spikes(self, step: int, metrics: Mapping[str, float]) -> None:
        """Compare the loss of each data set with its losses of the previous steps."""
        spikes = []
        for key, loss in metrics.items():
            name = key.removeprefix("train/loss/")
            tokens = metrics.get(f"train/tokens/{name}", 0.0)
            if name == key or not tokens or not math.isfinite(loss):
                continue
            before = self._before.setdefault(name, deque(maxlen=SPIKE_WINDOW))
            counts = [count for _, count in before]
            if before and tokens < _MIN_TOKEN_SHARE * statistics.median(counts):
                continue
            losses = sorted(loss_before for loss_before, _ in before)
            before.append((loss, tokens))
            if len(losses) >= MIN_SPIKE_STEPS and _is_spike(loss, losses):
                spikes.append((name, loss, losses))
        if not spikes or step < self._no_warning_before:
            return
        self._no_warning_before = step + SPIKE_WINDOW
        if is_first_rank():
            name, loss, losses = max(spikes, key=lambda spike: spike[1])
            median = statistics.median(losses)
            rows = _listed(row for row in self.rows_of(step) if row.dataset == name)
            times = f"{loss / median:.1f} times" if median else "far above"
            log.warning(
                f"step {step}: loss of {name} {loss:.4f} is {times} the median of the "
                f"{len(losses)} steps before ({median:.4f}); {rows}"
            )

    def _check_learning(self, step: int, loss: float) -> None:
        """Warn once, after the first part of the run, if the loss has hardly changed."""
        if step > self._first_part or len(self._first_losses) != step - 1:
            return  # after the first part, or resumed within it
        self._first_losses.append(loss)
        num_steps = self._first_part // 3
        if step < self._first_part or num_steps < MIN_PART_STEPS or not is_first_rank():
            return
        start = statistics.fmean(self._first_losses[:num_steps])
        now = statistics.fmean(self._first_losses[-num_steps:])
        chance = math.log(self._vocab_size) if self._vocab_size > 1 else math.inf
        if abs(now - chance) <= MIN_CHANGE * chance < math.inf:
            what = f"it is that of chance, log({self._vocab_size:,}) = {chance:.4f}"
        elif abs(now - start) <= MIN_CHANGE * start:
            what = f"it was {start:.4f} over the first {num_steps}"
        else:
            return
        log.warning(
            f"step {step}: nothing is learned so far: loss {now:.4f} over the last {num_steps} "
            f"steps, {what}; look at the rows ({verb_command('preview')}), try another "
            "optimizer.lr, or train more weights (adapter.r, adapter.target_modules)"
        )


def _is_spike(loss: float, before: Sequence[float]) -> bool:
    median, high = statistics.median(before), before[int(HIGH_SHARE * (len(before) - 1))]
    return loss > max(SPIKE_FACTOR * median, median + SPIKE_RISE, HIGH_FACTOR * high)


def _listed(rows: Iterable[StepRow]) -> str:
    origins = list(dict.fromkeys(str(row.origin) for row in rows))
    if not origins:
        return "the rows of a stream have no line numbers"
    more = f" and {len(origins) - _MAX_ROWS:,} more" if len(origins) > _MAX_ROWS else ""
    return f"rows {', '.join(origins[:_MAX_ROWS])}{more}"
