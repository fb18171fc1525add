"""A loss or a gradient that is not finite: no step is taken with it, and its rows are named.

Every step is judged before its optimizer, where the numbers are, and told when the curves are
written. A step that is left out changes no weight and no state of the optimizer; the data and the
schedule go on.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from app.process import faults
from app.process.errors import TrainingFault
from app.process.launch import is_first_rank
from app.training.objective import DatasetSums
from data_modules import Batch, StepRow

if TYPE_CHECKING:
    from app.training.metrics import StepRecord

log = logging.getLogger(__name__)

MAX_OVERFLOWS = 32
"""steps in a row that a loss scaler may skip: it halves its scale at each, and starts at 2**16"""
SPIKE_WINDOW, SPIKE_LEAST = 64, 16
"""steps that the median is taken of, and how many there must be: with more the steep start of a run
would stay in it for long, with fewer a step of few tokens is an event"""
SPIKE_FACTOR, SPIKE_RISE = 3.0, 1.0
"""times the median, and nats above it: of 4,393 steps of a sound run none came to 1.5 times, while
a loss that is near zero, learned by heart, often goes to many times that"""
MAX_ROWS = 5
"""rows that a message names"""
OF_A_LOSS = {"nan": math.nan, "inf": math.inf}
OF_A_GRADIENT = {"grad_nan": math.nan, "grad_inf": math.inf}
"""faults by name, and what they put in"""


class StepSkipped(Exception):
    """Ends an optimizer's step before it has changed anything."""


def spread(loss: Tensor) -> Tensor:
    """Return `loss` with gradients that are NaN where it is not finite.

    An infinite loss may have finite gradients. With this the norm of the gradients tells of both,
    and as ranks add up their gradients, of every rank's.
    """
    return loss * (1 + 0 * loss.detach())


def hold_back(optimizer: Any, grad_norm: Tensor, *, is_scaled: bool) -> None:
    """Keep `optimizer` from moving anything where `grad_norm` is not finite.

    Called within its step, by the closure. `is_scaled`: a loss scaler watches over the gradients.
    Raises StepSkipped where the optimizer cannot be told on the device.
    """
    if is_scaled:
        return  # the scaler has looked through the gradients, and skips by itself
    groups = optimizer.param_groups
    if isinstance(optimizer, torch.optim.AdamW) and all(group["fused"] for group in groups):
        # Its kernels read this on the device and leave all as it is where it is 1.
        optimizer.found_inf = grad_norm.isfinite().logical_not().float()
    # The others know of no such flag, and neither a gradient of zero nor a rate of zero leaves
    # their moments alone: one number is read in every step. Those of 8 bits wait for the device
    # after each weight anyhow.
    elif not math.isfinite(grad_norm.item()):
        raise StepSkipped


def inject(loss: Tensor, step: int, batch: Batch, sums: DatasetSums) -> Tensor:
    """Return `loss`, spoilt where `faults` says so for `step`, and in `sums` with it."""
    for name, value in OF_A_LOSS.items():
        if faults.is_due(name, step):
            sums.spoil(batch.dataset_ids[batch.labels >= 0].unique(), value)
            loss = loss + value  # its gradients stay finite
    for name, value in OF_A_GRADIENT.items():
        if faults.is_due(name, step):
            loss = loss * 1.0  # a node of its own
            loss.register_hook(lambda grad, value=value: grad * value)
    return loss


def check_finite(step: int, *parts: Mapping[str, Tensor]) -> None:
    """Raise TrainingFault where a tensor of a checkpoint of `step` is not finite.

    One number is read for each device.
    """
    by_device: dict[torch.device, dict[str, Tensor]] = {}
    for part in parts:
        for name, tensor in part.items():
            if tensor.is_floating_point() and tensor.numel():
                by_device.setdefault(tensor.device, {})[name] = tensor
    for tensors in by_device.values():
        # The least and the largest are NaN where one is, and need no room to be found.
        ends = [torch.stack(one.detach().aminmax()).double() for one in tensors.values()]
        found = torch.stack(ends).isfinite().all(1).tolist()
        bad = [name for name, is_finite in zip(tensors, found, strict=True) if not is_finite]
        if bad:
            raise TrainingFault(
                f"step {step}: {bad[0]} holds numbers that are not finite{_and_more(bad)}; no "
                "checkpoint is made of them, those before are kept; lower optimizer.lr and go on "
                "from the last one with resume=auto 'resume_allow=[lr]'"
            )


def not_finite(metrics: Mapping[str, float], prefix: str) -> list[str]:
    """Name what begins with `prefix` and is not finite, without the prefix."""
    return [
        name.removeprefix(prefix)
        for name, value in metrics.items()
        if name.startswith(prefix) and not math.isfinite(value)
    ]


def _and_more(names: list[str]) -> str:
    return f", and so do {len(names) - 1:,} more" if len(names) > 1 else ""


def _no_rows(step: int) -> Iterable[StepRow]:
    return ()


class StepWatch:
    """Judges steps as they are written: tells and counts the bad ones, stops at one too many.

    `rows_of` gives the rows of a step, counted from 1; none where they are not known.
    """

    def __init__(
        self,
        max_skipped_steps: int = 0,
        rows_of: Callable[[int], Iterable[StepRow]] = _no_rows,
    ) -> None:
        self.max_skipped_steps, self.rows_of = max_skipped_steps, rows_of
        self.num_skipped = 0
        """bad steps of the run so far"""
        self._num_overflows = 0
        self._losses: deque[float] = deque(maxlen=SPIKE_WINDOW)
        self._quiet_until = 0

    def judge(
        self,
        record: StepRecord,
        metrics: Mapping[str, float],
        reduce: Callable[[Tensor], Tensor],
    ) -> None:
        """Look at a step's figures over all ranks; every rank calls this for every step.

        TrainingFault at a bad step beyond those that may be skipped.
        """
        loss, norm = metrics.get("train/loss", 0.0), metrics["train/grad_norm"]
        self._count_overflow(record, norm)
        # A loss scaler skips a step whose scaled gradients overflow: its norm says nothing.
        if math.isfinite(loss) and (math.isfinite(norm) or record.is_scaled):
            self._look_for_spike(record.step, loss)
            return
        self.num_skipped += 1
        what = f"step {record.step}: {self._in_words(record, metrics, reduce)}"
        if self.num_skipped > self.max_skipped_steps:
            allowed = self.max_skipped_steps
            those = f" (after {allowed} that trainer.max_skipped_steps={allowed} let pass)"
            raise TrainingFault(
                f"{what}. The step was not taken{those if allowed else ''}; look at the rows, "
                f"lower optimizer.lr, or type trainer.max_skipped_steps={self.num_skipped} to "
                "leave such steps out"
            )
        if is_first_rank():
            log.warning(
                f"{what}. The step is left out, {self.num_skipped} of "
                f"trainer.max_skipped_steps={self.max_skipped_steps}"
            )

    def _in_words(
        self,
        record: StepRecord,
        metrics: Mapping[str, float],
        reduce: Callable[[Tensor], Tensor],
    ) -> str:
        """Say what was bad, and which rows it may come from."""
        loss, norm = metrics.get("train/loss"), metrics["train/grad_norm"]
        datasets = not_finite(metrics, "train/loss/")
        of_datasets = f" (of {', '.join(datasets)})" if datasets else ""
        said = f"loss {loss}{of_datasets}, gradient norm {norm}"
        places = _bad_micro_batches(record, reduce)
        rows = list(self.rows_of(record.step))
        suspects = [
            row
            for row in rows
            if (not datasets or row.dataset in datasets)
            and (not places or (row.rank, row.micro_batch) in places)
        ]
        return f"{said}; {_listed(suspects or rows)}"

    def _count_overflow(self, record: StepRecord, norm: float) -> None:
        self._num_overflows = 0 if math.isfinite(norm) else self._num_overflows + 1
        if record.is_scaled and self._num_overflows > MAX_OVERFLOWS:
            raise TrainingFault(
                f"step {record.step}: gradient norm {norm}, as in the {MAX_OVERFLOWS} steps before "
                "it: none was taken, and no loss scale is small enough; type "
                "trainer.precision=bf16 or fp32, or lower optimizer.lr"
            )

    def _look_for_spike(self, step: int, loss: float) -> None:
        if len(self._losses) >= SPIKE_LEAST and step >= self._quiet_until:
            median = statistics.median(self._losses)
            if loss > max(SPIKE_FACTOR * median, median + SPIKE_RISE):
                self._quiet_until = step + SPIKE_WINDOW
                if is_first_rank():
                    rows = _listed(self.rows_of(step))
                    log.warning(
                        f"step {step}: loss {loss:.4f} is {loss / median:.1f} times the median of "
                        f"the {len(self._losses)} steps before ({median:.4f}); {rows}"
                    )
        self._losses.append(loss)


def _bad_micro_batches(
    record: StepRecord, reduce: Callable[[Tensor], Tensor]
) -> set[tuple[int, int]]:
    """Return rank and number of the micro-batches of a step whose loss is not finite."""
    own = torch.stack(record.losses).isfinite().logical_not().float()
    places = own.new_zeros(record.num_ranks, len(own))
    places[record.rank] = own
    found = reduce(places).nonzero().tolist()
    return {(rank, micro_batch) for rank, micro_batch in found}


def _listed(rows: Iterable[StepRow]) -> str:
    """Word which rows a step has learned from, each once."""
    origins = list(dict.fromkeys(str(row.origin) for row in rows))
    if not origins:
        return "the rows of a stream are not known by line"
    more = f" and {len(origins) - MAX_ROWS:,} more" if len(origins) > MAX_ROWS else ""
    return f"rows {', '.join(origins[:MAX_ROWS])}{more}"
