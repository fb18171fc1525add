"""The result of a run: which step's weights, and the dtype in which a whole model is saved.

Both are decided by what the run measured on its validation rows, and said.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from app.evaluation.significance import MIN_DIFFERENCE, paired_bootstrap
from app.model.save import dtype_name, loses_bits, stored_dtype, trained_dtype
from app.model.shards import round_weights
from app.process.collectives import run_on_rank0
from app.run import Run, checkpoints_of
from app.training.checkpoint.documents import MODEL
from common.errors import TrainingFault

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PretrainedConfig

    from app.config import TrainConfig
    from app.evaluation.evaluator import Evaluator
    from app.training.checkpoint.checkpoint import Checkpoint
    from app.training.module import FinetuneModule

T = TypeVar("T")
HALF_SIZE = "output.dtype=bf16 would save half the bytes"
TUNED, ROUNDED = "tuned", "rounded"
"""variants of the trained model that the evaluator measures"""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Result:
    """The step whose weights are the result of a run."""

    step: int
    last: int
    """last optimizer step of the run"""
    monitor: str | None = None
    """metric by which the step is the best; None for the last step, whatever it measured"""
    value: float | None = None
    """the metric's value"""

    @property
    def is_last(self) -> bool:
        return self.step == self.last

    def __str__(self) -> str:
        if self.monitor is None:
            return f"step {self.step}, the last"
        by = f"the best by {self.monitor} ({self.value:.4f})"
        return (
            f"step {self.step}, {by}" if self.is_last else f"step {self.step} of {self.last}, {by}"
        )


def restore_result(config: TrainConfig, run: Run, module: FinetuneModule) -> Result:
    """Load the weights of the best step into the module, if they are the result of the run.

    If weights are sharded, all ranks call this.
    """
    last, metrics = module.trainer.global_step, module.metrics
    if not config.ends_with_best:
        return Result(last, last)
    best = _from_rank0(module, lambda: _best_of(run))
    if best is None:
        log.warning(
            "output.from=best: %s ranked no saved step, so the last one is used", metrics.monitor
        )
        return Result(last, last)
    step, metric = best
    if step != last:
        load_step(run, module, step)
    return Result(step, last, metrics.monitor, metrics.as_measured(metric))


def _best_of(run: Run) -> tuple[int, float] | None:
    """Return step and metric of the best undamaged checkpoint; None if none was ranked."""
    checkpoint, problems = checkpoints_of(run.folder).best_good()
    for problem in problems:
        log.warning("%s", problem)
    if checkpoint is None or checkpoint.metric is None:
        return None
    return checkpoint.step, checkpoint.metric


def load_step(run: Run, module: FinetuneModule, step: int) -> None:
    """Load the weights that were saved at `step`; if they are sharded, all ranks call this."""
    import torch

    module.load_state_dict(_checkpoint_of(run, step).tensors(MODEL))
    torch.clear_autocast_cache()


def _checkpoint_of(run: Run, step: int) -> Checkpoint:
    for checkpoint in checkpoints_of(run.folder).checkpoints():
        if checkpoint.step == step:
            return checkpoint
    raise TrainingFault(f"{run.folder}: the checkpoint of step {step} is gone")


def _from_rank0(module: FinetuneModule, decide: Callable[[], T]) -> T:
    """Return what `decide` returns on rank 0, on every rank that ends the run."""
    if module.shards is None:
        return decide()
    decided = run_on_rank0(decide)
    result: T = module.trainer.strategy.broadcast(decided)
    return result


def choose_dtype(
    config: TrainConfig,
    run: Run,
    module: FinetuneModule,
    evaluator: Evaluator,
    architecture: PretrainedConfig,
    result: Result,
) -> tuple[torch.dtype, dict[str, float] | None]:
    """Return the dtype in which a whole model is saved, and its validation losses if known.

    If it rounds the trained weights, both are measured on the validation rows, and the module has
    the trained weights again afterwards. If weights are sharded, all ranks call this.
    """
    import torch

    asked, model = config.output.dtype, module.model
    trained = trained_dtype(model)
    exact = torch.promote_types(trained, torch.float32)
    if asked == "fp32":
        return exact, last_losses(module, evaluator, result)
    wanted = torch.bfloat16 if asked == "bf16" else stored_dtype(model, architecture)
    losses = last_losses(module, evaluator, result)
    if not loses_bits(trained, wanted):
        return wanted, losses
    if not len(evaluator.data.val_examples):
        if asked == "auto":
            log.info(
                "model: saved in %s: there are no validation rows to measure what rounding to %s "
                "costs; %s",
                *(dtype_name(exact), dtype_name(wanted), HALF_SIZE),
            )
        return exact if asked == "auto" else wanted, None
    losses = losses or evaluator.measure_losses(TUNED, model)
    rows = evaluator.row_losses[TUNED]
    round_weights(model, wanted, module.shards)
    rounded = evaluator.measure_losses(ROUNDED, model)
    rounded_rows = evaluator.row_losses.pop(ROUNDED)
    load_step(run, module, result.step)
    cost, low = _compare_losses(rows, rounded_rows)
    keeps = asked == "auto" and not low <= MIN_DIFFERENCE / 2  # also if the loss is not finite
    log.info(
        "model: rounding to %s changes val/loss from %.4f to %.4f (%+.4f%s): saved in %s%s",
        dtype_name(wanted),
        losses["val/loss"],
        rounded["val/loss"],
        cost,
        "" if low > MIN_DIFFERENCE / 2 else ", within noise",
        dtype_name(exact if keeps else wanted),
        f"; {HALF_SIZE}" if keeps else "",
    )
    if keeps:
        return exact, losses
    evaluator.row_losses[TUNED] = rounded_rows
    return wanted, rounded


def last_losses(
    module: FinetuneModule, evaluator: Evaluator, result: Result
) -> dict[str, float] | None:
    """Return the validation losses of the result if the run has measured them, with their rows."""
    metrics = module.metrics
    rows = metrics.row_losses[-1]
    if rows is None or rows.shape[1] != len(evaluator.data.val_examples):
        return None
    if not metrics.validations or not metrics.validated_step == result.step == result.last:
        return None
    evaluator.row_losses[TUNED] = rows
    return metrics.validations[-1]


def _compare_losses(trained: Tensor, rounded: Tensor) -> tuple[float, float]:
    """Return how much higher the loss of the rounded weights is, and the least it could be.

    Both are [2, rows]: weighted losses and weights, as in `Evaluator.row_losses`.
    """
    weights = trained[1].numpy()
    counted = weights > 0  # a row without a token to train on has no loss
    differences = ((rounded[0] - trained[0]).numpy()[counted]) / weights[counted]
    low, _ = paired_bootstrap(differences, weights[counted])
    return float((differences * weights[counted]).sum() / weights.sum()), low
