"""What measures the models of a run: base beside tuned, and the one that trains on its way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from app.config import TrainConfig
from app.evaluation.during import DuringTraining, small_set
from app.evaluation.evaluator import Evaluator
from app.evaluation.generation import EvaluationConfig
from app.evaluation.shares import Shares
from app.evaluation.tasks.questions import Task, build_tasks
from app.process.errors import UserError, nearest
from app.training.trainer import validation_interval
from data_modules import FinetuneDataModule

if TYPE_CHECKING:
    from torch import Tensor

    from app.assembly.base import Base
    from app.strategy.mixin import StrategyMixin


def build_evaluator(
    config: EvaluationConfig,
    base: Base,
    data: FinetuneDataModule,
    tasks: Sequence[Task],
    *,
    shards: StrategyMixin | None = None,
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
    shares: Shares | None = None,
) -> Evaluator:
    """Build what measures a model on the held-out rows of `data`, and by `tasks`.

    `shards`, `sum_over_ranks` and `shares` as for `Evaluator`.
    """
    return Evaluator(
        config,
        data,
        base.tokenizer,
        base.stop_ids | data.stop_token_ids,
        base.backend,
        max_len=base.spec.context_len or data.sequence_len,
        tasks=tasks,
        shares=shares,
        shards=shards,
        sum_over_ranks=sum_over_ranks,
    )


def build_during(
    config: TrainConfig, base: Base, data: FinetuneDataModule, folder: Path
) -> DuringTraining | None:
    """Build what measures tasks and answers while a model trains; None where nothing does.

    UserError where what is monitored is not measured.
    """
    during, every = None, config.evaluation.every_steps
    if every is not None:
        settings, tasks = small_set(config.evaluation, build_tasks(config.evaluation))
        during = DuringTraining(
            build_evaluator(settings, base, data, tasks),
            folder,
            every_steps=every,
            interval=validation_interval(config.trainer, data.total_steps),
            last=data.total_steps,
        )
    check_monitor(config.trainer.checkpoint.monitor, data, during)
    return during


def check_monitor(monitor: str, data: FinetuneDataModule, during: DuringTraining | None) -> None:
    """Raise UserError where a run does not measure, while it trains, what it monitors."""
    held_out = set(data.val_examples.datasets.tolist())
    losses = [f"val/loss/{name}" for n, name in enumerate(data.dataset_names) if n in held_out]
    known = ["val/loss", *losses, *([] if during is None else during.names)]
    if monitor in known:
        return
    name = monitor.removeprefix("val/loss/")
    if name != monitor and name in data.dataset_names:
        raise UserError(
            f"trainer.checkpoint.monitor={monitor}: no row of {name} is held out; "
            "type a larger data.val_set_size, or val/loss"
        )
    raise UserError(
        f"trainer.checkpoint.monitor={monitor} is not measured while this run "
        f"trains{nearest(monitor, known)}; it measures {', '.join(known[:20])}"
        + ("" if during else "; evaluation.every_steps=N measures evaluation.tasks, too")
    )
