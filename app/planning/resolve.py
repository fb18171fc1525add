"""What `auto` is for the GPUs of a run: recompute and the micro-batch, by what its plan says."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from app.planning.choose import (
    Choice,
    MicroBatchChoice,
    choose_micro_batch,
    choose_recompute,
)
from app.planning.memory import PlannedRun
from app.process.launch import is_first_rank
from app.training.micro_batch import can_try
from app.training.trainer import Environment

if TYPE_CHECKING:
    from app.config import TrainConfig
    from app.run import Run
    from data_modules import FinetuneDataModule

log = logging.getLogger(__name__)


def resolve_recompute(
    config: TrainConfig, env: Environment, plan: PlannedRun | None
) -> TrainConfig:
    """Return `config` with recompute=auto chosen by what fits a GPU; on a CPU it stays as it is.

    `plan` has its strategy and its micro-batch.
    """
    if config.recompute.mode != "auto" or env.accelerator == "cpu":
        return config
    choice = Choice("full", "the model's config does not say how wide its layers are")
    if plan is not None:
        choice, _ = choose_recompute(plan, compiles=config.trainer.compile)
    if is_first_rank():
        log.info("recompute: %s", choice)
    return replace(config, recompute=replace(config.recompute, mode=choice.name))


def resolve_micro_batch(
    config: TrainConfig,
    data: FinetuneDataModule,
    env: Environment,
    run: Run,
    plan: PlannedRun | None,
) -> Environment:
    """Return `env` with trainer.micro_batch_size=auto chosen, and have `data` take it.

    A resumed run takes its own again. What a GPU has room for is chosen by arithmetic; the module
    tries it. The packs of a step stay the same. `plan` has its strategy.
    """
    if config.trainer.micro_batch_size != "auto":
        return env
    is_tried = False
    if (before := run.micro_batch_size(env.num_data_ranks)) is not None:
        choice = MicroBatchChoice(before, "as the run that is resumed")
    elif config.data.streaming:
        choice = MicroBatchChoice(1, "the order of a stream depends on it")
    elif env.accelerator == "cpu":
        choice = MicroBatchChoice(1, "more are for a GPU, whose memory says how many")
    elif plan is None:
        choice = MicroBatchChoice(1, "the model's config does not say how wide its layers are")
    else:
        is_tried = can_try(plan.strategy)
        if config.recompute.mode == "auto":  # what one pack at a time needs
            mode, _ = choose_recompute(plan, compiles=config.trainer.compile)
            plan = replace(plan, recompute=mode.name)
        choice, _ = choose_micro_batch(plan)
    if is_first_rank():
        log.info("micro-batch: %s", choice)
    data.take_together(choice.size)
    env = env.with_micro_batch(choice.size)
    return replace(env, tries_micro_batch=is_tried and choice.size > 1)
