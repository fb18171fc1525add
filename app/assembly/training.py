"""Build the Lightning trainer, the Lightning module and the evaluators of a training run.

During training, tasks and held-out prompts are answered on a small fixed set. The metrics are
logged with the validation as `val/<metric>/<task or data set>`. The description of a run is
compared when it is resumed, and written, with its page, when its training starts.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import lightning as L

from app.assembly.auto import probe_micro_batch
from app.assembly.base import Base, build_objective
from app.config import TrainConfig, changed_settings, save_config
from app.evaluation.evaluator import Evaluator
from app.evaluation.row_runner import RowRunner
from app.evaluation.tasks.questions import build_tasks
from app.model.adapter import keep_start
from app.model.recompute import WHOLE_LAYERS
from app.planning.training import Estimate
from app.process import signals
from app.process.collectives import all_gather
from app.process.faults import arm_faults, parse_faults
from app.process.heartbeat import is_watched, refresh_liveness
from app.process.launch import is_first_rank, read_launch
from app.process.logs import open_run_log
from app.report.run_page import write_page
from app.run import Run, global_batch_of
from app.run.folder import CONFIG_FILE
from app.run.manifest import identity_of, installed_versions, save_manifest
from app.run.ranks import build_peers
from app.run.remote import url_of
from app.strategy import settings as strategies
from app.training import callbacks
from app.training.checkpoint.saving import build_checkpoints, build_saver, signals_of
from app.training.loggers import RunLogger
from app.training.metrics import FirstLoss, Metrics, StepWatch, is_measured_at
from app.training.module import FinetuneModule
from app.training.objective.distill import open_references
from app.training.objective.objective import Objective, choose_router_aux_loss
from app.training.optimizers import build_optimizer, resolve_lr
from app.training.trainer import (
    Environment,
    build_lightning_trainer,
    build_loggers,
    validation_interval,
)
from common.errors import UserError, nearest
from common.redaction import redacted
from data_modules import BatchSpec, FinetuneDataModule

if TYPE_CHECKING:
    from app.strategy.mixin import StrategyMixin

log = logging.getLogger(__name__)

_DROPOUTS = ("_pdrop", "dropout", "_drop")
"""endings of names of dropout in config.json"""
_SAMPLES = "samples"
"""folder of a run with the answers of the model, one file per measurement"""
_VARIANT = "val"
_ROUNDING = {"base": (1e-6, 2**-7), "cached": (1e-4, 0.05)}
"""`objective.reference` -> how far the first loss may be off, relative, in fp32 and in half
precision; stored values were computed in packs of other sizes"""
_PAGE_SECONDS = 60
"""shortest time between two writes of the page of a run that trains"""
_PAGE_SHARE = 0.01
"""largest share of the training time that writing it takes: a long run's page is written less
often"""


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
            progress := callbacks.ProgressBar(),
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
            callbacks.StatusFile(run.folder, data.plan.epoch_at, checkpoints.store, progress),
            LivePage(run),
        ],
        folder=run.folder,
        checkpoints=checkpoints,
    )
    faults, _ = parse_faults(config.faults)
    arm_faults(faults, run.folder, rank=trainer.global_rank, num_ranks=env.num_ranks)
    return trainer


def build_strategy(
    config: strategies.StrategyConfig,
    *,
    accelerator: str,
    num_ranks: int,
    accumulation: int = 1,
    stages: Sequence[tuple[int, int]] = (),
) -> StrategyMixin:
    """Build the strategy for `num_ranks` processes; `auto` must already be resolved.

    `accumulation`: micro-batches of a rank's optimizer step. `stages`: layers [first, stop) of each
    stage of a pipeline.
    """
    from app.strategy.ddp import CompressedDdp, Ddp, SingleDevice
    from app.strategy.rendezvous import use_separate_store

    use_separate_store()
    strategy: StrategyMixin
    if isinstance(config, strategies.PipelineConfig):
        from app.strategy.pipeline import Pipeline

        strategy = Pipeline(config, stages)
    elif isinstance(config, strategies.ZeroConfig):
        # DeepSpeed reads this once, when it is imported.
        os.environ["DS_ACCELERATOR"] = {"gpu": "cuda"}.get(accelerator, accelerator)
        from app.strategy.deepspeed import Zero

        strategy = Zero(config, accumulation)
    elif isinstance(config, strategies.LocalSgdConfig):
        from app.strategy.local_sgd import LocalSgd, SiteSgd

        strategy = SiteSgd(config) if config.sites > 1 else LocalSgd(config)
    elif isinstance(config, strategies.FsdpConfig):
        from app.strategy.fsdp import Fsdp

        strategy = Fsdp(config)
    elif isinstance(config, strategies.DdpConfig) and config.compression != "none":
        strategy = CompressedDdp(config)
    elif isinstance(config, strategies.DdpConfig) or num_ranks > 1:
        strategy = Ddp()
    else:
        strategy = SingleDevice("cuda:0" if accelerator == "gpu" else "cpu")
    strategy.context_size = strategies.context_parallel_size(config)
    return strategy


def _build_monitors(
    config: TrainConfig,
    run: Run,
    env: Environment,
    facts: Mapping[str, Any],
    estimate: Estimate | None,
) -> list[L.Callback]:
    """Build the callbacks that check and measure a run; they precede the saver."""
    monitors: list[L.Callback] = []
    if env.num_ranks > 1:  # hashing the program reads all of it
        values = callbacks.rank_invariant_values(config, facts)
        monitors.append(
            callbacks.SameOnAllRanks(values, callbacks.program_values(installed_versions()))
        )
    monitors += [
        callbacks.GradientCheck(),
        callbacks.MachineStatsMonitor(
            run.folder, None if estimate is None else estimate.peak_tokens_per_second
        ),
    ]
    if config.trainer.compile:
        # Imported here: importing the compiler takes a second.
        from app.training.compilation import Compilation

        monitors.append(Compilation())
    if is_watched():
        monitors.append(callbacks.Heartbeat(run.folder))
    elif (num_ranks := read_launch().num_ranks or 1) > 1:
        monitors.append(callbacks.Heartbeat(run.folder, build_peers(run, num_ranks)))
    return monitors


def build_module(
    config: TrainConfig, base: Base, data: FinetuneDataModule, env: Environment, trainer: L.Trainer
) -> FinetuneModule:
    """Build the Lightning module: model, optimizer, schedule and loss.

    The model itself is built in `configure_model`, where a strategy shards it while it is loaded.
    """
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
    teacher = base.teacher and replace(base.teacher, placement=cast("Any", trainer.strategy))
    objective = build_objective(config.objective, config.model, teacher)
    evaluation = build_training_evaluation(
        config, base, data, objective, Path(trainer.default_root_dir), signals_of(trainer).poll
    )
    folder = strategies.states_folder(config.strategy, Path(trainer.default_root_dir))
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
        trains_in_fp8=config.trainer.precision == "fp8",
        uses_fused_kernels=config.trainer.kernels == "auto" and not config.trainer.compile,
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
        patience=config.trainer.early_stopping_patience,
    )


def _first_loss(config: TrainConfig, base: Base, env: Environment) -> FirstLoss | None:
    """Return the loss that the first step must have; None if the base or noise decide it."""
    settings = base.architecture.get_text_config().to_dict()
    has_dropout = any(settings[name] for name in settings if name.endswith(_DROPOUTS))
    known = config.objective.first_loss
    if known is None or config.adapter.neftune_alpha or has_dropout:
        return None
    tolerances = _ROUNDING[config.objective.reference_source]
    return FirstLoss(
        value=known,
        tolerance=tolerances[env.precision != "fp32"],
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


class TrainingEvaluation:
    """Measures answers of the model at every validation selected by `every_steps`."""

    def __init__(
        self,
        evaluator: Evaluator,
        folder: Path,
        *,
        every_steps: int,
        interval: int,
        last: int,
        poll: Callable[[], int | None] = signals.signal_received,
    ) -> None:
        """`poll`: collective that returns the signal that any rank has received, on every rank."""
        self.evaluator, self.folder, self._poll = evaluator, folder / _SAMPLES, poll
        self._is_due: Callable[[int], bool] = lambda step: (
            step == last or is_measured_at(step, every_steps, interval)
        )
        self.names = evaluator.metric_names(_VARIANT)
        """names of the metrics of a measurement"""

    def measure(self, module: FinetuneModule, step: int) -> dict[str, float]:
        """Return the metrics after `step`, the same on every rank; empty if no measurement is due.

        Ranks that hold the whole model each take a share of the rows. Does not advance the random
        number generators of training. A signal interrupts the measurement on all ranks.
        """
        if not self._is_due(step):
            return {}
        from lightning.pytorch.utilities.seed import isolate_rng

        strategy, trainer = module.strategy, module.trainer
        sharding = strategy if strategy.shards_weights else None
        self.evaluator.sharding = sharding
        self.evaluator.runner = self._row_runner(trainer, is_sharded=sharding is not None)
        interruptible = signals.measuring() if trainer.world_size == 1 else nullcontext()
        with interruptible, isolate_rng(), trainer.precision_plugin.forward_context():
            metrics = self.evaluator.measure_answers(_VARIANT, module.model)
        if trainer.is_global_zero:
            self.folder.mkdir(exist_ok=True)
            self.evaluator.write_predictions(self.folder, f"step-{step}.jsonl")
        return metrics

    def _row_runner(self, trainer: Any, *, is_sharded: bool) -> RowRunner:
        """Return what divides the rows among ranks; ranks can save a checkpoint only together."""
        if trainer.world_size == 1:
            return RowRunner(show=lambda *_: refresh_liveness())
        if is_sharded:  # all ranks compute the same batches together
            return RowRunner(show=self._refresh_and_agree)
        return RowRunner(
            rank=trainer.global_rank,
            num_ranks=trainer.world_size,
            gather=all_gather,
            show=lambda *_: refresh_liveness(),
            own_rows=_ended_by_signal,
            agree=self._agree,
        )

    def _refresh_and_agree(self, *_: Any) -> None:
        refresh_liveness()
        self._agree()

    def _agree(self) -> None:
        if (signum := self._poll()) is not None:
            raise signals.MeasurementInterrupted(signum)


@contextmanager
def _ended_by_signal() -> Iterator[None]:
    """Let a signal end the work of this rank, which then saves together with the others."""
    try:
        with signals.measuring():
            yield
    except signals.DataStalled:
        signals.suspend_deadline()


def build_training_evaluation(
    config: TrainConfig,
    base: Base,
    data: FinetuneDataModule,
    objective: Objective,
    folder: Path,
    poll: Callable[[], int | None],
) -> TrainingEvaluation | None:
    """Build the measurement of tasks and answers during training; None if none is requested.

    `poll` as for `TrainingEvaluation`. UserError if the monitored metric is not measured.
    """
    evaluation, settings = None, config.evaluation
    if settings.every_steps is not None:
        most = settings.during_rows  # only the first rows
        tasks = [
            replace(each, max_rows=min(each.max_rows or most, most)) for each in settings.tasks
        ]
        fewer = replace(settings, max_rows=min(settings.max_rows, most), tasks=tasks, harness=[])
        evaluation = TrainingEvaluation(
            Evaluator(fewer, base, data, build_tasks(fewer), objective),
            folder,
            every_steps=settings.every_steps,
            interval=validation_interval(config.trainer, data.total_steps),
            last=data.total_steps,
            poll=poll,
        )
    _check_monitor(config.trainer.checkpoint.monitor, data, evaluation, objective.figures)
    return evaluation


def _check_monitor(
    monitor: str,
    data: FinetuneDataModule,
    evaluation: TrainingEvaluation | None,
    figures: Sequence[str] = (),
) -> None:
    held_out = set(data.val_examples.datasets.tolist())
    measured = ("loss", *figures)
    names = [name for number, name in enumerate(data.dataset_names) if number in held_out]
    own = [f"val/{one}/{name}" for one in measured for name in names]
    answers = [] if evaluation is None else evaluation.names
    known = [*(f"val/{one}" for one in measured), *own, *answers]
    if monitor in known:
        return
    name = monitor.removeprefix("val/loss/")
    if name != monitor and name in data.dataset_names:
        raise UserError(
            f"trainer.checkpoint.monitor={monitor}: no row of {name} is held out for validation; "
            "type a larger data.val_set_size, or val/loss"
        )
    raise UserError(
        f"trainer.checkpoint.monitor={monitor} is not measured during this "
        f"run{nearest(monitor, known)}; measured are {', '.join(known[:20])}"
        + ("" if evaluation else "; evaluation.every_steps=N measures evaluation.tasks, too")
    )


def describe_run(
    config: TrainConfig, base: Base, data: FinetuneDataModule, env: Environment
) -> dict[str, Any]:
    """Return the facts about a run in its manifest, which a resumed run is compared with."""
    return {
        "seed": config.seed,
        "base": base.description,
        "data": [asdict(dataset) for dataset in data.report.datasets],
        "test_data": [asdict(dataset) for dataset in data.report.test_datasets],
        "precision": "fp8" if config.trainer.precision == "fp8" else env.precision,
        "strategy": strategies.strategy_words(config.strategy),
        "global_batch": _global_batch(data),
        "total_steps": data.total_steps,
        **data.fingerprints(),
    }


def _global_batch(data: FinetuneDataModule) -> dict[str, int]:
    batching = data.batching
    return global_batch_of(
        batching.micro_batch_size, batching.accumulation_steps, batching.num_ranks
    )


class WriteMetadata(L.Callback):
    """Write config.yaml, manifest.json and the data reports on rank 0.

    Written when a new run is set up, and when a resumed run starts to train: until then its folder
    stays unchanged, since this process may still fail. The manifest is written again if probing
    before the first step has changed the micro-batch size.
    """

    def __init__(
        self,
        run: Run,
        identity: Mapping[str, Any],
        facts: Mapping[str, Any],
        data: FinetuneDataModule,
    ) -> None:
        """`identity` is saved in the run's checkpoints; `facts` are those of `describe_run`."""
        self.run, self.identity, self.facts, self.data = run, identity, facts, data
        self.is_written = False
        self._batching: BatchSpec | None = None

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        if self.run.checkpoint is None:
            self._write(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Write the metadata of a resumed run, once all ranks have loaded its checkpoint."""
        self._write(trainer)
        if trainer.is_global_zero and self.data.batching != self._batching:
            self._write_manifest()

    def on_fit_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Write the metadata of a resumed run that had no steps left."""
        self._write(trainer)

    def _write(self, trainer: L.Trainer) -> None:
        if trainer.is_global_zero and not self.is_written:
            self._write_all(trainer.loggers)
        self.is_written = True

    def _write_all(self, loggers: Sequence[RunLogger]) -> None:
        run = self.run
        run.discard_later_steps()
        open_run_log(run.folder)
        # After the checkpoints: a crash in between must not leave checkpoints without their rows.
        for logger in loggers:
            logger.drop_rows_after(None if run.checkpoint is None else run.step)
        if run.config == run.typed_config:  # otherwise it is kept already
            keep_start(run.typed_config.adapter, run.folder)
        save_config(run.typed_config, run.folder / CONFIG_FILE)
        self.data.write_reports(run.folder)
        self._write_manifest()
        for logger in loggers:
            logger.log_hyperparams(redacted(asdict(run.typed_config)))
        self._batching = self.data.batching

    def _write_manifest(self) -> None:
        now = {**self.facts, "global_batch": _global_batch(self.data)}
        save_manifest(self.run.folder, **now, run=self.identity, earlier=self.run.history())


class LivePage(L.Callback):
    """Write report.html on rank 0 while a run trains, from the files in its folder alone."""

    def __init__(self, run: Run) -> None:
        self.run, self.next_write = run, 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.next_write = time.monotonic() + _PAGE_SECONDS

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if not trainer.is_global_zero or (started := time.monotonic()) < self.next_write:
            return
        settings = changed_settings(self.run.typed_config)
        write_page(self.run.folder, settings, refresh_seconds=_PAGE_SECONDS)
        ended = time.monotonic()
        self.next_write = ended + max(_PAGE_SECONDS, (ended - started) / _PAGE_SHARE)
