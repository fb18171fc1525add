"""Skip optimizer steps whose loss or gradient norm is not finite, and name their rows.

A step is skipped on the device, before the optimizer, and reported when its metrics are written. It
changes no weight and no optimizer state; the data and the schedule advance.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from app.process import faults
from app.process.launch import is_first_rank
from app.training.objective.objective import DatasetSums
from common.errors import TrainingFault
from common.installation import verb_command
from data_modules import Batch, StepRow

if TYPE_CHECKING:
    from app.training.metrics import StepRecord

log = logging.getLogger(__name__)

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
_LOSS_FAULTS = {"nan": math.nan, "inf": math.inf}
_GRADIENT_FAULTS = {"grad_nan": math.nan, "grad_inf": math.inf}
"""injected values by fault name"""


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
        # Fused kernels read this on the device, and change nothing if it is 1.
        optimizer.found_inf = grad_norm.isfinite().logical_not().float()
    # Other optimizers have no such flag, and a zero gradient or learning rate would still change
    # their moments: one number is read on the host in every step.
    elif not math.isfinite(grad_norm.item()):
        raise StepSkipped


def inject_faults(loss: Tensor, step: int, batch: Batch, sums: DatasetSums) -> Tensor:
    """Return `loss` with the faults that are due at `step`; a faulty loss also enters `sums`."""
    for name, value in _LOSS_FAULTS.items():
        if faults.is_due(name, step):
            sums.scale_losses(batch.dataset_ids[batch.labels >= 0].unique(), value)
            loss = loss + value  # its gradients stay finite
    for name, value in _GRADIENT_FAULTS.items():
        if faults.is_due(name, step):
            loss = loss * 1.0  # a separate node for the hook
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
        self,
        record: StepRecord,
        metrics: Mapping[str, float],
        reduce: Callable[[Tensor], Tensor],
    ) -> None:
        """Check a step's metrics over all ranks; every rank calls this for every step.

        TrainingFault at one nonfinite step more than may be skipped.
        """
        loss, norm = metrics.get("train/loss", 0.0), metrics["train/grad_norm"]
        self._count_overflow(record, norm)
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
        self,
        record: StepRecord,
        metrics: Mapping[str, float],
        reduce: Callable[[Tensor], Tensor],
    ) -> str:
        """Return the values of a nonfinite step, and the rows that may have caused it."""
        loss, norm = metrics.get("train/loss"), metrics["train/grad_norm"]
        datasets = nonfinite_metrics(metrics, "train/loss/")
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
    """Return whether a loss is a spike compared with those `before` it, which are sorted."""
    median, high = statistics.median(before), before[int(HIGH_SHARE * (len(before) - 1))]
    return loss > max(SPIKE_FACTOR * median, median + SPIKE_RISE, HIGH_FACTOR * high)


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
    more = f" and {len(origins) - _MAX_ROWS:,} more" if len(origins) > _MAX_ROWS else ""
    return f"rows {', '.join(origins[:_MAX_ROWS])}{more}"
