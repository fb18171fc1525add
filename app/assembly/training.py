"""Build the Lightning trainer and the Lightning module of a training run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L

from app.assembly.base import Base
from app.assembly.evaluation import TrainingEvaluation, build_training_evaluation
from app.assembly.metadata import LivePage, WriteMetadata
from app.config import TrainConfig
from app.model.recompute import WHOLE_LAYERS
from app.planning.training import Estimate
from app.process.faults import arm_faults, parse_faults
from app.process.heartbeat import is_watched
from app.process.launch import is_first_rank, read_launch
from app.run import Run
from app.run.manifest import identity_of, installed_versions
from app.run.ranks import build_peers
from app.run.remote import url_of
from app.strategy.build import build_strategy
from app.strategy.settings import states_folder
from app.training.callbacks.checks import (
    GradientCheck,
    SameOnAllRanks,
    program_values,
    rank_invariant_values,
)
from app.training.callbacks.monitors import (
    Heartbeat,
    MachineStatsMonitor,
    ProgressBar,
    StatusFile,
)
from app.training.checkpoint.saving import build_checkpoints, build_saver, signals_of
from app.training.logger import build_loggers
from app.training.metrics import FirstLoss, Metrics
from app.training.micro_batch import probe_micro_batch
from app.training.module import FinetuneModule
from app.training.nonfinite import StepWatch
from app.training.objective.build import build_objective
from app.training.objective.cached import open_references
from app.training.objective.objective import Objective
from app.training.optimizers import build_optimizer
from app.training.routing import choose_router_aux_loss
from app.training.schedule import resolve_lr
from app.training.trainer import Environment, build_lightning_trainer
from data_modules import FinetuneDataModule

log = logging.getLogger(__name__)

_DROPOUTS = ("_pdrop", "dropout", "_drop")
"""endings of names of dropout in config.json"""


def build_trainer(
    config: TrainConfig,
    run: Run,
    env: Environment,
    data: FinetuneDataModule,
    facts: Mapping[str, Any],
    estimate: Estimate | None = None,
) -> L.Trainer:
    """Build the Lightning trainer of a run: strategy, loggers, checkpoints and callbacks.

    `facts`: those of `describe_run`, which must be equal on all ranks. `estimate`: the estimated
    cost of the run.
    """
    identity = identity_of(run.manifest, facts)
    last_step = None if run.checkpoint is None else run.step
    loggers = build_loggers(config.logger, run.folder, data.dataset_names, last_step=last_step)
    checkpoints = build_checkpoints(
        config.trainer.checkpoint,
        run.folder,
        run.checkpoint,
        identity,
        ends_with_best=config.ends_with_best,
        num_writers=None if url_of(run.folder) is None else read_launch().num_local_ranks,
    )
    trainer = build_lightning_trainer(
        config.trainer,
        env=env,
        strategy=build_strategy(
            config.strategy,
            accelerator=env.accelerator,
            num_ranks=env.num_ranks,
            accumulation=env.accumulation,
            stages=() if estimate is None else estimate.stages,
        ),
        total_steps=data.total_steps,
        loggers=loggers,
        callbacks=[
            *_build_monitors(config, run, env, facts, estimate),
            build_saver(
                config.trainer,
                checkpoints,
                data.plan,
                has_validation=len(data.val_examples) > 0,
                measure_every=config.evaluation.every_steps,
                loss_names=[f"val/loss/{name}" for name in data.dataset_names],
            ),
            WriteMetadata(run, identity, facts, data),
            StatusFile(run.folder, data.plan.epoch_at, checkpoints.store),
            LivePage(run),
        ],
        folder=run.folder,
        checkpoints=checkpoints,
    )
    faults, _ = parse_faults(config.faults)
    arm_faults(faults, run.folder, rank=trainer.global_rank, num_ranks=env.num_ranks)
    return trainer


def _build_monitors(
    config: TrainConfig,
    run: Run,
    env: Environment,
    facts: Mapping[str, Any],
    estimate: Estimate | None,
) -> list[L.Callback]:
    """Build the callbacks that show progress and check a run; they precede the saver."""
    monitors: list[L.Callback] = [ProgressBar()]
    if env.num_ranks > 1:  # hashing the program reads all of it
        values = rank_invariant_values(config, facts)
        monitors.append(SameOnAllRanks(values, program_values(installed_versions())))
    monitors += [
        GradientCheck(),
        MachineStatsMonitor(
            run.folder, None if estimate is None else estimate.peak_tokens_per_second
        ),
    ]
    if config.trainer.compile:
        # Imported here: importing the compiler takes a second.
        from app.training.callbacks.compilation import Compilation

        monitors.append(Compilation())
    if is_watched():
        monitors.append(Heartbeat(run.folder))
    elif (num_ranks := read_launch().num_ranks or 1) > 1:
        monitors.append(Heartbeat(run.folder, build_peers(run, num_ranks)))
    return monitors


def build_module(
    config: TrainConfig,
    base: Base,
    data: FinetuneDataModule,
    env: Environment,
    trainer: L.Trainer,
) -> FinetuneModule:
    """Build the Lightning module: model, optimizer, schedule and loss.

    The model itself is built in `configure_model`, where a strategy shards it while it is loaded.
    """
    settings = config.trainer
    lr = resolve_lr(
        config.optimizer,
        config.adapter,
        env.packs_of_rank * env.num_data_ranks,
        from_scratch=config.model.from_scratch,
        objective=config.objective,
    )
    log.debug("steps: %s", data.plan.line())
    log.info("steps: %s; %s", data.plan.summary(), lr.sentence)
    if lr.warning is not None and is_first_rank():
        log.warning(lr.warning)
    objective = build_objective(config.objective, config.model, base.teacher)
    evaluation = build_training_evaluation(
        config, base, data, objective, Path(trainer.default_root_dir), signals_of(trainer).poll
    )
    folder = states_folder(config.strategy, Path(trainer.default_root_dir))
    return FinetuneModule(
        base.model_builder(config, env),
        backend=base.backend,
        objective=objective,
        build_optimizer=partial(
            build_optimizer,
            config=config.optimizer,
            adapter=config.adapter,
            lr=lr.value,
            # Lightning refuses fused optimizers with a loss scaler, although we clip gradients.
            fused=env.precision != "fp16",
            states_folder=folder,
        ),
        schedule=config.schedule,
        total_steps=data.total_steps,
        is_packed=data.is_packed,
        metrics=_build_metrics(config, base, data, env, trainer, objective, evaluation),
        trains_in_fp8=settings.precision == "fp8",
        uses_fused_kernels=settings.kernels == "auto" and not settings.compile,
        recomputes_layers=config.recompute.mode in WHOLE_LAYERS,
        router_aux_loss=choose_router_aux_loss(
            base.architecture, config.adapter, config.model.router_aux_loss
        ),
        probe_micro_batch=partial(
            probe_micro_batch, optimizer=config.optimizer.name if folder is None else None
        )
        if env.probes_micro_batch
        else None,
        store_references=open_references(config.objective, data, base, env.precision),
        measure=None if evaluation is None else evaluation.measure,
        patience=settings.early_stopping_patience,
    )


def _first_loss(config: TrainConfig, base: Base, env: Environment) -> FirstLoss | None:
    """Return the loss that the first step must have; None if the base or noise decide it."""
    settings = base.architecture.get_text_config().to_dict()
    has_dropout = any(settings[name] for name in settings if name.endswith(_DROPOUTS))
    known = config.objective.first_loss
    if known is None or config.adapter.neftune_alpha or has_dropout:
        return None
    return FirstLoss(
        value=known,
        tolerance=1e-4 if env.precision == "fp32" else 0.05,
        of=f"objective={config.objective.name}",
    )


def _build_metrics(
    config: TrainConfig,
    base: Base,
    data: FinetuneDataModule,
    env: Environment,
    trainer: L.Trainer,
    objective: Objective,
    evaluation: TrainingEvaluation | None,
) -> Metrics:
    """Build the metrics of every step, and the check that they are finite."""
    settings = config.trainer
    watch = StepWatch(
        settings.max_skipped_steps,
        data.rows_of_step,
        total_steps=data.total_steps,
        vocab_size=base.spec.vocab_size or 0,
    )
    metrics = Metrics(
        data.dataset_names,
        trainer.loggers,
        settings.log_every_steps,
        watch,
        settings.checkpoint.monitor,
        objective.figures,
        _first_loss(config, base, env),
    )
    metrics.add_columns([] if evaluation is None else evaluation.names)
    return metrics
