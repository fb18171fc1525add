"""Skip optimizer steps whose loss or gradient norm is not finite, and name their rows.

A step is skipped on the device, before the optimizer, and reported when its metrics are written. It
changes no weight and no optimizer state; the data and the schedule advance.
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
"""consecutive steps that a loss scaler may skip: each halves its scale, which starts at 2**16"""
SPIKE_WINDOW, MIN_SPIKE_STEPS = 64, 16
"""steps of the median, and how many it needs: a longer window would hold the steep start of a run,
with fewer steps one of few tokens looks like a spike"""
SPIKE_FACTOR, SPIKE_RISE = 3.0, 1.0
"""a spike is above this multiple of the median, and this many nats above it: none of 4,393 steps of
a healthy run reached 1.5 times; a loss near zero, of memorized rows, often jumps by more"""
MAX_ROWS = 5
"""rows listed in a message"""
LOSS_FAULTS = {"nan": math.nan, "inf": math.inf}
GRADIENT_FAULTS = {"grad_nan": math.nan, "grad_inf": math.inf}
"""values that injected faults multiply in, by their names"""


class StepSkipped(Exception):
    """Ends an optimizer step before it has changed anything."""


def propagate_nonfinite(loss: Tensor) -> Tensor:
    """Return `loss`, with NaN gradients if it is not finite.

    An infinite loss may have finite gradients. This way the gradient norm, which covers all ranks,
    is not finite in either case.
    """
    return loss * (1 + 0 * loss.detach())


def skip_nonfinite_step(optimizer: Any, grad_norm: Tensor, *, is_scaled: bool) -> None:
    """Make `optimizer` skip its step if `grad_norm` is not finite.

    Called within the step's closure. `is_scaled`: a loss scaler checks the gradients. Raises
    StepSkipped if the optimizer cannot skip on the device.
    """
    if is_scaled:
        return  # the scaler has checked the gradients, and skips by itself
    groups = optimizer.param_groups
    if isinstance(optimizer, torch.optim.AdamW) and all(group["fused"] for group in groups):
        # Its kernels read this on the device, and change nothing if it is 1.
        optimizer.found_inf = grad_norm.isfinite().logical_not().float()
    # The others have no such flag, and a zero gradient or rate would still change their moments:
    # one number is read on the host in every step.
    elif not math.isfinite(grad_norm.item()):
        raise StepSkipped


def inject(loss: Tensor, step: int, batch: Batch, sums: DatasetSums) -> Tensor:
    """Return `loss` with the faults that are due at `step`; a faulty loss also enters `sums`."""
    for name, value in LOSS_FAULTS.items():
        if faults.is_due(name, step):
            sums.scale_losses(batch.dataset_ids[batch.labels >= 0].unique(), value)
            loss = loss + value  # its gradients stay finite
    for name, value in GRADIENT_FAULTS.items():
        if faults.is_due(name, step):
            loss = loss * 1.0  # a node of its own
            loss.register_hook(lambda grad, value=value: grad * value)
    return loss


def check_finite(step: int, *parts: Mapping[str, Tensor]) -> None:
    """Raise TrainingFault if a tensor of the checkpoint of `step` is not finite.

    One number is read per device.
    """
    by_device: dict[torch.device, dict[str, Tensor]] = {}
    for part in parts:
        for name, tensor in part.items():
            if tensor.is_floating_point() and tensor.numel():
                by_device.setdefault(tensor.device, {})[name] = tensor
    for tensors in by_device.values():
        # Minimum and maximum are NaN if one value is, and need no memory.
        ranges = [torch.stack(one.detach().aminmax()).double() for one in tensors.values()]
        found = torch.stack(ranges).isfinite().all(1).tolist()
        bad = [name for name, is_finite in zip(tensors, found, strict=True) if not is_finite]
        if bad:
            raise TrainingFault(
                f"step {step}: {bad[0]} holds numbers that are not finite{_and_more(bad)}; no "
                "checkpoint is saved, earlier ones are kept; lower optimizer.lr and resume "
                "from the last one with resume=auto 'resume_allow=[lr]'"
            )


def not_finite(metrics: Mapping[str, float], prefix: str) -> list[str]:
    """Return the metrics that start with `prefix` and are not finite, without the prefix."""
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
    """Check steps as they are written: warn of skipped ones and of spikes, stop at one too many.

    `rows_of` returns the rows of a step, counted from 1; none if they are not known.
    """

    def __init__(
        self,
        max_skipped_steps: int = 0,
        rows_of: Callable[[int], Iterable[StepRow]] = _no_rows,
    ) -> None:
        self.max_skipped_steps, self.rows_of = max_skipped_steps, rows_of
        self.num_skipped = 0
        """nonfinite steps of the run so far"""
        self._num_overflows = 0
        self._losses: deque[float] = deque(maxlen=SPIKE_WINDOW)
        self._no_warning_before = 0

    def check(
        self,
        record: StepRecord,
        metrics: Mapping[str, float],
        reduce: Callable[[Tensor], Tensor],
    ) -> None:
        """Check a step's metrics over all ranks; every rank calls this for every step.

        TrainingFault at a nonfinite step beyond those that may be skipped.
        """
        loss, norm = metrics.get("train/loss", 0.0), metrics["train/grad_norm"]
        self._count_overflow(record, norm)
        # A loss scaler skips steps whose scaled gradients overflow: that is no fault.
        if math.isfinite(loss) and (math.isfinite(norm) or record.is_scaled):
            self._check_spike(record.step, loss)
            return
        self.num_skipped += 1
        what = f"step {record.step}: {self._describe(record, metrics, reduce)}"
        if self.num_skipped > self.max_skipped_steps:
            allowed = self.max_skipped_steps
            after = f" (after {allowed} that trainer.max_skipped_steps={allowed} allows)"
            raise TrainingFault(
                f"{what}. The step was skipped{after if allowed else ''}; check the rows, "
                f"lower optimizer.lr, or type trainer.max_skipped_steps={self.num_skipped} to "
                "skip such steps"
            )
        if is_first_rank():
            log.warning(
                f"{what}. The step is skipped, {self.num_skipped} of "
                f"trainer.max_skipped_steps={self.max_skipped_steps}"
            )

    def _describe(
        self,
        record: StepRecord,
        metrics: Mapping[str, float],
        reduce: Callable[[Tensor], Tensor],
    ) -> str:
        """Return what is not finite, and the rows that it may come from."""
        loss, norm = metrics.get("train/loss"), metrics["train/grad_norm"]
        datasets = not_finite(metrics, "train/loss/")
        of_datasets = f" (of {', '.join(datasets)})" if datasets else ""
        values = f"loss {loss}{of_datasets}, gradient norm {norm}"
        places = _bad_micro_batches(record, reduce)
        rows = list(self.rows_of(record.step))
        suspects = [
            row
            for row in rows
            if (not datasets or row.dataset in datasets)
            and (not places or (row.rank, row.micro_batch) in places)
        ]
        return f"{values}; {_listed(suspects or rows)}"

    def _count_overflow(self, record: StepRecord, norm: float) -> None:
        self._num_overflows = 0 if math.isfinite(norm) else self._num_overflows + 1
        if record.is_scaled and self._num_overflows > MAX_OVERFLOWS:
            raise TrainingFault(
                f"step {record.step}: gradient norm {norm}, as in the {MAX_OVERFLOWS} steps before "
                "it: all were skipped, and no loss scale is small enough; type "
                "trainer.precision=bf16 or fp32, or lower optimizer.lr"
            )

    def _check_spike(self, step: int, loss: float) -> None:
        if len(self._losses) >= MIN_SPIKE_STEPS and step >= self._no_warning_before:
            median = statistics.median(self._losses)
            if loss > max(SPIKE_FACTOR * median, median + SPIKE_RISE):
                self._no_warning_before = step + SPIKE_WINDOW
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
    """Return (rank, index) of the micro-batches of a step whose loss is not finite."""
    own = torch.stack(record.losses).isfinite().logical_not().float()
    places = own.new_zeros(record.num_ranks, len(own))
    places[record.rank] = own
    found = reduce(places).nonzero().tolist()
    return {(rank, micro_batch) for rank, micro_batch in found}


def _listed(rows: Iterable[StepRow]) -> str:
    """List the rows of a step, each once."""
    origins = list(dict.fromkeys(str(row.origin) for row in rows))
    if not origins:
        return "the rows of a stream have no line numbers"
    more = f" and {len(origins) - MAX_ROWS:,} more" if len(origins) > MAX_ROWS else ""
    return f"rows {', '.join(origins[:MAX_ROWS])}{more}"
