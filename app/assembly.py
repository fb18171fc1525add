"""The parts of a run, each built from those before it: what the verbs share.

    Environment -> Base -> data module -> strategy -> trainer, module

A verb imports this inside its function, after what needs no torch: it imports torch and lightning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L

from app.config import (
    EvaluateConfig,
    TrainConfig,
    TunedConfig,
    load_run_config,
    save_config,
    settings_of,
)
from app.evaluation.comparison import Evaluator
from app.evaluation.during import DuringTraining, small_set
from app.evaluation.shares import Shares
from app.evaluation.tasks.questions import build_tasks
from app.evaluation.tuned import Tuned, find_tuned, read_tuned
from app.model.adapter import (
    AdapterConfig,
    FullConfig,
    LoraConfig,
    is_adapter,
)
from app.model.attention import attention_implementation, choose_backend, why_not_packed
from app.model.base import (
    ModelConfig,
    check_described,
    commit_of,
    context_len,
    decoder_start_token_id,
    load_architecture,
    load_base,
)
from app.model.build import build_model, load_tuned, weight_dtype
from app.model.quantization import QuantizationConfig, stored_settings
from app.model.tokenizer import (
    build_tokenizer,
    new_token_ids,
    num_rows,
    stop_token_ids,
    trained_token_ids,
    with_chat_template,
)
from app.planning.choose import Choice, choose_strategy, recompute_modes
from app.planning.memory import PlannedRun
from app.planning.planned import NOT_PLANNED
from app.planning.resolve import resolve_micro_batch, resolve_recompute
from app.planning.training import (
    Estimate,
    check_room,
    estimate_training,
    find_ways,
    hardware_here,
    plan_training,
)
from app.preflight import check_compatibility, describe_base
from app.process.errors import UserError, nearest
from app.process.faults import arm, parse_faults
from app.process.heartbeat import is_watched
from app.process.launch import is_first_rank, read_launch
from app.process.logs import keep_log
from app.run import Run, global_batch_of
from app.run.folder import CONFIG_FILE
from app.run.manifest import installed_versions, save_manifest
from app.run.ranks import watch_ranks
from app.strategy.build import build_strategy
from app.strategy.settings import FAMILIES, StrategyConfig
from app.training.callbacks.gradient_check import GradientCheck
from app.training.callbacks.heartbeat import Heartbeat
from app.training.callbacks.progress import ProgressBar
from app.training.callbacks.same_on_all_ranks import (
    SameOnAllRanks,
    program_values,
    rank_invariant_values,
)
from app.training.callbacks.watch_machine import WatchMachine
from app.training.callbacks.write_metadata import WriteMetadata
from app.training.checkpoint.saving import build_checkpoints, build_saver
from app.training.logger import build_loggers, drop_rows_after
from app.training.metrics import Metrics
from app.training.micro_batch import try_micro_batch
from app.training.module import FinetuneModule
from app.training.nonfinite import StepWatch
from app.training.optimizers import build_optimizer
from app.training.routing import choose_router_aux_loss
from app.training.schedule import resolve_lr
from app.training.trainer import Environment, build_lightning_trainer, validation_interval
from data_modules import (
    BatchSpec,
    DataSpec,
    FinetuneDataModule,
    ModelSpec,
    dataset_names,
    redacted,
)

if TYPE_CHECKING:
    import torch
    from lightning.pytorch.loggers import Logger
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from app.strategy.mixin import StrategyMixin

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """The base model of a run: all that is known of it before its weights are read."""

    config: ModelConfig
    quantization: QuantizationConfig
    architecture: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    backend: str
    """attention backend"""
    spec: ModelSpec
    """what the data depends on of it"""
    dtype: torch.dtype
    """dtype that its weights are kept in"""
    new_ids: list[int]
    """token ids without a trained row in the embedding"""
    trained_ids: list[int]
    """token ids whose rows train beside an adapter"""
    stop_ids: set[int]
    """token ids that end an answer, besides those of the chat template"""
    description: Mapping[str, str | None]
    """path, revision and fingerprints, for the manifest"""

    def load(self) -> PreTrainedModel:
        """Load the base itself, without an adapter."""
        implementation = attention_implementation(self.backend)
        return load_base(self.config, implementation, self.dtype, self.quantization, self.new_ids)

    def load_tuned(self, folder: Path) -> torch.nn.Module:
        """Load what a run saved in `folder`: an adapter on this base, or a whole model."""
        implementation = attention_implementation(self.backend)
        return load_tuned(
            self.config, folder, implementation, self.dtype, self.quantization, self.new_ids
        )

    def model_builder(
        self, config: TrainConfig, env: Environment
    ) -> Callable[..., torch.nn.Module]:
        """Return what builds the model to train."""
        return partial(
            build_model,
            self.config,
            quantization=self.quantization,
            backend=self.backend,
            adapter=config.adapter,
            recompute=config.recompute,
            precision=env.precision,
            new_ids=self.new_ids,
            token_ids=self.trained_ids,
        )

    def shapes_builder(
        self, config: TrainConfig, env: Environment
    ) -> Callable[[], torch.nn.Module] | None:
        """Return what builds it on meta and not quantized; None where its files are quantized."""
        if stored_settings(self.architecture):
            return None
        build = self.model_builder(config, env)
        return partial(build, quantization=QuantizationConfig(), on_meta=True)


def open_base(config: TrainConfig | TunedConfig, env: Environment, adapter: AdapterConfig) -> Base:
    """Read config and tokenizer of the base, and choose its attention; no weight is read.

    `model.revision` becomes the commit that a base of the hub was read at.
    UserError where they do not fit `config` or the environment.
    """
    model = config.model
    architecture = load_architecture(model)
    check_described(model, architecture)
    model.revision = commit_of(model) or model.revision  # branches and tags of the hub move
    attention = choose_backend(config.attention, architecture, env.accelerator, env.precision)
    log.info("device: %s, attention %s", env, attention)
    tokenizer = build_tokenizer(model)
    new_ids = new_token_ids(model, tokenizer, num_rows(architecture))
    return Base(
        config=model,
        quantization=config.quantization,
        architecture=architecture,
        tokenizer=tokenizer,
        backend=attention.backend,
        dtype=weight_dtype(env.precision, adapter),
        spec=model_spec(architecture, new_ids, attention.backend),
        new_ids=new_ids,
        trained_ids=trained_token_ids(tokenizer, model.added_tokens, adapter),
        stop_ids=stop_token_ids(tokenizer, model.stop_tokens),
        description=describe_base(model),
    )


def adapter_of(config: TunedConfig) -> AdapterConfig:
    """Return how the tuned model was trained, which decides the dtypes of its weights."""
    if config.run is not None and config.adapter_path is None:
        return load_run_config(Path(config.run)).adapter
    is_lora = config.tuned_path is None or is_adapter(Path(config.tuned_path))
    return LoraConfig() if is_lora else FullConfig()


def trained_datasets(config: EvaluateConfig) -> set[str] | None:
    """Return which data sets of an evaluation its run was trained on, by name or by path.

    None where there is no run to ask.
    """
    if config.run is None or config.adapter_path is not None:
        return None
    of_run = load_run_config(Path(config.run)).data.datasets
    trained, paths = set(dataset_names(of_run)), {dataset.path for dataset in of_run}
    for datasets in (config.data.datasets, config.data.test_datasets):
        named = zip(dataset_names(datasets), datasets, strict=True)
        trained |= {name for name, dataset in named if dataset.path in paths}
    return trained


def open_tuned(config: TunedConfig, env: Environment) -> Tuned:
    """Open a base and read how what was trained on it talks; no weight is read.

    UserError where a run's adapter or model is gone.
    """
    adapter, folder = adapter_of(config), find_tuned(config)
    base = open_base(config, env, adapter)
    return read_tuned(base, adapter, folder)


def model_spec(
    architecture: PretrainedConfig, new_ids: Sequence[int], backend: str = "auto"
) -> ModelSpec:
    """Return what the data depends on of a model, once it has rows for `new_ids`."""
    return ModelSpec(
        context_len=context_len(architecture),
        vocab_size=num_rows(architecture, new_ids),
        decoder_start_token_id=decoder_start_token_id(architecture),
        why_not_packed=why_not_packed(architecture.to_dict(), backend),
    )


def build_datamodule(
    config: TrainConfig | EvaluateConfig,
    tokenizer: PreTrainedTokenizerBase,
    spec: ModelSpec,
    batching: BatchSpec,
    *,
    first_rows: int | None = None,
) -> FinetuneDataModule:
    """Build the data module of a verb; `setup` is left to the caller."""
    data = with_chat_template(config.data, config.model, tokenizer)
    return FinetuneDataModule(
        DataSpec(
            config=data,
            packing=config.packing,
            tokenizer=tokenizer,
            model=spec,
            batching=batching,
            seed=config.seed,
            first_rows=first_rows,
        )
    )


def build_data(config: TrainConfig, base: Base, env: Environment, run: Run) -> FinetuneDataModule:
    """Prepare, audit and plan the data of a training: all its steps, before a weight is read."""
    trainer = config.trainer
    batching = BatchSpec(
        micro_batch_size=env.micro_batch_size,
        accumulation_steps=env.accumulation,
        num_ranks=env.num_data_ranks,
        num_epochs=trainer.num_epochs,
        max_steps=trainer.max_steps,
        row_multiple=env.row_multiple,
        pad_packs=trainer.compile,  # layers are compiled for one size of batch
    )
    data = build_datamodule(config, base.tokenizer, base.spec, batching)
    data.first_step = run.step
    data.setup("fit")
    if config.evaluation.exact_match:
        data.prompts(config.evaluation.max_rows)  # warns now of those that are too long
    if is_first_rank():
        for line in data.brief():
            log.info("%s", line)
        for line in (*data.report.lines(), *data.audit.notes()):
            log.debug("data: %s", line)
        data.audit.check()
    return data


def build_evaluator(
    config: TrainConfig | EvaluateConfig,
    base: Base,
    data: FinetuneDataModule,
    shards: StrategyMixin | None = None,
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None,
    shares: Shares | None = None,
) -> Evaluator:
    """Build what measures base and tuned model on the held-out rows of `data`, and by tasks.

    `shards`, `sum_over_ranks` and `shares` as for `Evaluator`.
    """
    return Evaluator(
        config.evaluation,
        data,
        base.tokenizer,
        base.stop_ids | data.stop_token_ids,
        base.backend,
        max_len=base.spec.context_len or data.sequence_len,
        tasks=build_tasks(config.evaluation),
        shares=shares,
        shards=shards,
        sum_over_ranks=sum_over_ranks,
    )


def resolve_auto(
    config: TrainConfig, base: Base, data: FinetuneDataModule, env: Environment, run: Run
) -> tuple[TrainConfig, Environment, Estimate | None]:
    """Return settings and environment with strategy, micro-batch and recompute chosen by a plan,
    and what the run is planned to take; None where it is not known.

    UserError where it will not fit, as plan.enforce says.
    """
    plan = plan_run(config, base, data, env)
    config = replace(config, strategy=resolve_strategy(config, base, env, plan))
    if plan is None:
        env = resolve_micro_batch(config, data, env, run, plan)
        return resolve_recompute(config, env, plan), env, None
    plan = replace(plan, strategy=config.strategy)
    env = resolve_micro_batch(config, data, env, run, plan)
    plan = plan.with_micro_batch(env.micro_batch_size)
    config = resolve_recompute(config, env, plan)
    mode = config.recompute.mode
    plan = replace(plan, recompute="none" if mode == "auto" else mode)
    return config, env, check_plan(config, base, data, plan)


def plan_run(
    config: TrainConfig, base: Base, data: FinetuneDataModule, env: Environment
) -> PlannedRun | None:
    """Return what a plan knows of a run; None where it cannot tell its memory."""
    return plan_training(
        config,
        env,
        hardware_here(env, config.trainer.num_nodes, partial(settings_of, "hardware")),
        whole=base.architecture.to_dict(),
        backend=base.backend,
        sequence_len=data.sequence_len,
        build_on_meta=base.shapes_builder(config, env),
    )


def resolve_strategy(
    config: TrainConfig, base: Base, env: Environment, plan: PlannedRun | None
) -> StrategyConfig:
    """Return the strategy of `config`, with `auto` chosen by what fits a GPU."""
    if config.strategy.name != "auto":
        return config.strategy
    if plan is None and env.num_ranks > 1:
        name = "ddp" if env.accelerator == "cpu" else "fsdp"
        choice = Choice(name, "the model's config does not say how wide its layers are")
    elif plan is None:
        choice = Choice("single", "1 process")
    else:
        choice = choose_strategy(
            plan,
            known_strategies(),
            recompute_modes(config.recompute.mode, compiles=config.trainer.compile),
            is_stored=stored_settings(base.architecture) is not None,
            has_deepspeed=find_spec("deepspeed") is not None,
        )
    chosen: StrategyConfig = settings_of("strategy", choice.name)
    known = check_compatibility(config)
    found = check_compatibility(replace(config, strategy=chosen))
    if problems := [problem for problem in found if problem not in known]:
        raise UserError([f"strategy=auto is {choice}; but {problem}" for problem in problems])
    if is_first_rank():
        log.log(logging.DEBUG if choice.name == "single" else logging.INFO, "strategy: %s", choice)
    return chosen


def known_strategies() -> dict[str, StrategyConfig]:
    """Return the settings of each strategy that can be planned, by its name."""
    return {name: settings_of("strategy", name) for name in FAMILIES if name not in NOT_PLANNED}


def check_plan(
    config: TrainConfig, base: Base, data: FinetuneDataModule, plan: PlannedRun
) -> Estimate:
    """Log what a run is planned to take; UserError where it will not fit, as plan.enforce says."""
    estimate = estimate_training(plan)
    if is_first_rank():
        # Of a GPU, which may be rented; a CPU's is in train.log.
        log.log(
            logging.INFO if plan.is_on_gpu else logging.DEBUG,
            "plan: %s",
            estimate.line(data.total_steps),
        )
    whole = base.architecture.to_dict()
    ways = partial(find_ways, config, plan, whole, known_strategies)
    check_room(plan, estimate, config.plan.enforce, ways)
    return estimate


def describe_run(
    config: TrainConfig,
    base: Base,
    data: FinetuneDataModule,
    env: Environment,
) -> dict[str, Any]:
    """Return what the manifest says of a run, and what a resumed run is compared by."""
    return {
        "seed": config.seed,
        "base": base.description,
        "data": [asdict(dataset) for dataset in data.report.datasets],
        "test_data": [asdict(dataset) for dataset in data.report.test_datasets],
        "precision": env.precision,
        "strategy": config.strategy.name,
        "global_batch": _global_batch(data),
        "total_steps": data.total_steps,
        **data.fingerprints(),
    }


def _global_batch(data: FinetuneDataModule) -> dict[str, int]:
    batching = data.batching
    return global_batch_of(
        batching.micro_batch_size, batching.accumulation_steps, batching.num_ranks
    )


def build_trainer(
    run: Run,
    env: Environment,
    strategy: StrategyConfig,
    data: FinetuneDataModule,
    facts: Mapping[str, Any],
    estimate: Estimate | None = None,
) -> L.Trainer:
    """Build the Lightning trainer of a run: strategy, loggers, checkpoints and callbacks.

    `facts` describe the run (`describe_run`); all ranks must agree on them. `estimate`: what it is
    planned to take.
    """
    config = run.config
    identity = run.identity(facts)
    resumed_step = None if run.checkpoint is None else run.step
    loggers = build_loggers(config.logger, run.folder, data.dataset_names, last_step=resumed_step)
    checkpoints = build_checkpoints(config.trainer.checkpoint, run.folder, run.checkpoint, identity)

    def write_metadata() -> None:
        run.discard_later_steps()
        keep_log(run.folder)
        # Behind it: a crash in between must not leave checkpoints without their rows.
        drop_rows_after(resumed_step, loggers)
        save_config(config, run.folder / CONFIG_FILE)
        data.write_reports(run.folder)
        write_manifest()
        for logger in loggers:
            logger.log_hyperparams(redacted(asdict(config)))

    def write_manifest() -> None:
        now = {**facts, "global_batch": _global_batch(data)}
        save_manifest(run.folder, **now, run=identity, earlier=run.history())

    trainer = build_lightning_trainer(
        config.trainer,
        env=env,
        strategy=build_strategy(strategy, accelerator=env.accelerator, num_ranks=env.num_ranks),
        total_steps=data.total_steps,
        loggers=loggers,
        callbacks=[
            *_build_watchers(run, facts, estimate),
            build_saver(
                config.trainer,
                checkpoints,
                data.plan,
                has_validation=len(data.val_examples) > 0,
                measure_every=config.evaluation.every_steps,
            ),
            WriteMetadata(write_metadata, write_manifest, is_resumed=run.checkpoint is not None),
        ],
        folder=run.folder,
        checkpoints=checkpoints,
    )
    faults, _ = parse_faults(config.faults)
    arm(faults, run.folder, rank=trainer.global_rank, num_ranks=env.num_ranks)
    return trainer


def _build_watchers(
    run: Run, facts: Mapping[str, Any], estimate: Estimate | None
) -> list[L.Callback]:
    """Return the callbacks that show and check how a training goes; they come before the saver."""
    watchers: list[L.Callback] = [
        ProgressBar(),
        SameOnAllRanks(
            rank_invariant_values(run.config, facts), program_values(installed_versions())
        ),
        GradientCheck(),
        WatchMachine(run.folder, None if estimate is None else estimate.tokens_at_full_rate),
    ]
    if run.config.trainer.compile:
        # Imported here: the compiler takes a second to import.
        from app.training.callbacks.compilation import Compilation

        watchers.append(Compilation())
    if is_watched():
        watchers.append(Heartbeat(run.folder))
    elif (num_ranks := read_launch().num_ranks or 1) > 1:
        watchers.append(Heartbeat(run.folder, watch_ranks(run, num_ranks)))
    return watchers


def build_module(
    config: TrainConfig,
    base: Base,
    data: FinetuneDataModule,
    env: Environment,
    loggers: list[Logger],
    folder: Path,
) -> FinetuneModule:
    """Build the Lightning module: model, optimizer, schedule and loss.

    The model itself is made in `configure_model`, where a strategy shards it while it loads.
    """
    trainer = config.trainer
    lr = resolve_lr(
        config.optimizer,
        config.adapter,
        env.packs_of_rank * env.num_data_ranks,
        from_scratch=config.model.from_scratch,
    )
    log.debug("plan: %s", data.plan.line())
    log.info("plan: %s; %s", data.plan.brief(), lr.sentence)
    if lr.warning is not None and is_first_rank():
        log.warning(lr.warning)
    watch = StepWatch(
        trainer.max_skipped_steps,
        data.rows_of_step,
        total_steps=data.total_steps,
        vocab_size=base.spec.vocab_size or 0,
    )
    during = build_during(config, base, data, folder)
    metrics = Metrics(
        data.dataset_names, loggers, trainer.log_every_steps, watch, trainer.checkpoint.monitor
    )
    metrics.add_measurements([] if during is None else during.names)
    return FinetuneModule(
        base.model_builder(config, env),
        backend=base.backend,
        build_optimizer=partial(
            build_optimizer,
            config=config.optimizer,
            adapter=config.adapter,
            lr=lr.value,
            # Lightning refuses fused optimizers beside a loss scaler, although we clip ourselves.
            fused=env.precision != "fp16",
        ),
        schedule=config.schedule,
        total_steps=data.total_steps,
        is_packed=data.is_packed,
        metrics=metrics,
        uses_fused_kernels=trainer.kernels == "auto" and not trainer.compile,
        router_aux_loss=choose_router_aux_loss(
            base.architecture, config.adapter, config.model.router_aux_loss
        ),
        try_micro_batch=partial(try_micro_batch, optimizer=config.optimizer.name)
        if env.tries_micro_batch
        else None,
        measure=None if during is None else during.measure,
        patience=trainer.early_stopping_patience,
    )


def build_during(
    config: TrainConfig, base: Base, data: FinetuneDataModule, folder: Path
) -> DuringTraining | None:
    """Build what measures tasks and answers while a model trains; None where nothing does.

    UserError where what is monitored is not measured.
    """
    every, checkpoint = config.evaluation.every_steps, config.trainer.checkpoint
    during = None
    if every is not None:
        asked, tasks = small_set(config.evaluation, build_tasks(config.evaluation))
        evaluator = Evaluator(
            asked,
            data,
            base.tokenizer,
            base.stop_ids | data.stop_token_ids,
            base.backend,
            max_len=base.spec.context_len or data.sequence_len,
            tasks=tasks,
        )
        interval = validation_interval(config.trainer, data.total_steps)
        during = DuringTraining(
            evaluator, folder, every_steps=every, interval=interval, last=data.total_steps
        )
    held_out = set(data.val_examples.datasets.tolist())
    losses = [f"val/loss/{name}" for n, name in enumerate(data.dataset_names) if n in held_out]
    if checkpoint.monitor not in losses and checkpoint.monitor.startswith("val/loss/"):
        name = checkpoint.monitor.removeprefix("val/loss/")
        if name in data.dataset_names:
            raise UserError(
                f"trainer.checkpoint.monitor={checkpoint.monitor}: no row of {name} is held out; "
                "type a larger data.val_set_size, or val/loss"
            )
    known = ["val/loss", *losses]
    known += [] if during is None else during.names
    if checkpoint.monitor not in known:
        raise UserError(
            f"trainer.checkpoint.monitor={checkpoint.monitor} is not measured while this run "
            f"trains{nearest(checkpoint.monitor, known)}; it measures {', '.join(known[:20])}"
            + ("" if every else "; evaluation.every_steps=N measures evaluation.tasks, too")
        )
    return during
