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
from app.evaluation.conversation import Responder
from app.evaluation.shares import Shares
from app.evaluation.tasks.questions import build_tasks
from app.model.activation_memory import FP32, HALF, Kept, widths_of
from app.model.adapter import (
    AdapterConfig,
    FreezeConfig,
    FullConfig,
    LoraConfig,
    apply_adapter,
    is_adapter,
    save_adapter,
    save_converted,
    saves_whole_model,
    write_origin,
)
from app.model.attention import attention_implementation, choose_backend, why_not_packed
from app.model.base import (
    ModelConfig,
    context_len,
    decoder_start_token_id,
    load_architecture,
    load_base,
)
from app.model.build import build_model, load_tuned, weight_dtype
from app.model.experts import has_experts
from app.model.quantization import QuantizationConfig, stored_settings
from app.model.recompute import Memory, RecomputeConfig, choose_recompute
from app.model.tokenizer import (
    build_tokenizer,
    new_token_ids,
    num_rows,
    saved_stop_ids,
    stop_token_ids,
    trained_token_ids,
    with_chat_template,
)
from app.preflight import check_compatibility, describe_base
from app.preflight.couplings.table import CHANGE_BASE
from app.process.errors import UserError
from app.process.faults import arm, parse_faults
from app.process.heartbeat import is_watched
from app.process.launch import is_first_rank
from app.run import Run, describe_global_batch, global_batch_of
from app.run.find import checkpoints_of
from app.run.folder import CONFIG_FILE
from app.run.manifest import read_manifest, save_manifest
from app.strategy.build import build_strategy, choose_strategy
from app.strategy.settings import StrategyConfig
from app.training.callbacks.gradient_check import GradientCheck
from app.training.callbacks.heartbeat import Heartbeat
from app.training.callbacks.progress import ProgressBar
from app.training.callbacks.same_on_all_ranks import SameOnAllRanks, rank_invariant_values
from app.training.callbacks.write_metadata import WriteMetadata
from app.training.checkpoint.documents import MODEL
from app.training.checkpoint.saving import build_checkpoints, build_saver
from app.training.checkpoint.state import restore_model, trainable_parameters
from app.training.logger import build_loggers, drop_rows_after
from app.training.metrics import Metrics
from app.training.micro_batch import (
    MicroBatchChoice,
    can_try,
    choose_micro_batch,
    try_micro_batch,
)
from app.training.model_states import gather_facts, gather_memory, measure_footprint
from app.training.module import FinetuneModule
from app.training.nonfinite import StepWatch
from app.training.optimizers import build_optimizer
from app.training.schedule import resolve_lr
from app.training.trainer import Environment, build_lightning_trainer
from data_modules import (
    BatchSpec,
    ChatTemplate,
    DataSpec,
    FinetuneDataModule,
    ModelSpec,
    dataset_names,
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


def open_base(config: TrainConfig | TunedConfig, env: Environment, adapter: AdapterConfig) -> Base:
    """Read config and tokenizer of the base, and choose its attention; no weight is read.

    UserError where they do not fit `config` or the environment.
    """
    model = config.model
    architecture = load_architecture(model)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """A base with what was trained on it, and how it was taught to talk."""

    base: Base
    adapter: AdapterConfig
    folder: Path | None
    """of an adapter or a whole model; None for the base alone"""
    tokenizer: PreTrainedTokenizerBase
    """the one that training has saved, with its chat template"""
    template: ChatTemplate
    stop_ids: set[int]
    """token ids that end an answer"""

    def load(self, env: Environment) -> torch.nn.Module:
        """Load the tuned model as an evaluation measures it, on the device of `env`."""
        model = self.base.load() if self.folder is None else self.base.load_tuned(self.folder)
        return place_as_trained(model, self.adapter, env).eval()

    def responder(self, model: torch.nn.Module, env: Environment) -> Responder:
        """Let `model` answer conversations, with the template and the stop tokens of training."""
        return Responder(
            model.eval(),
            self.tokenizer,
            self.template,
            self.stop_ids,
            context_len=self.base.spec.context_len,
            autocast=env.autocast,
        )


def place_as_trained(model: Any, adapter: AdapterConfig, env: Environment) -> torch.nn.Module:
    """Give a loaded model the dtypes that its training had, and move it to the device of `env`."""
    if isinstance(adapter, FreezeConfig):  # its layers have the dtypes of their training
        model = apply_adapter(model, adapter, half_precision=env.precision == "bf16-pure")
    placed: torch.nn.Module = model.to(env.torch_device)
    return placed


def open_tuned(config: TunedConfig, env: Environment) -> Tuned:
    """Open a base and read how what was trained on it talks; no weight is read.

    UserError where a run's adapter or model is gone.
    """
    adapter = adapter_of(config)
    folder = None if config.tuned_path is None else Path(config.tuned_path)
    if folder is not None and not is_adapter(folder) and not (folder / "config.json").is_file():
        raise UserError(f"run={config.run}: there is neither an adapter nor a model in {folder}")
    base = open_base(config, env, adapter)
    tokenizer, stop_ids = base.tokenizer, set(base.stop_ids)
    if folder is not None and (folder / "tokenizer_config.json").is_file():
        tokenizer = build_tokenizer(ModelConfig(path=str(folder)))
        stop_ids |= saved_stop_ids(folder)
    template = ChatTemplate.resolve(
        tokenizer,
        None if tokenizer.chat_template else config.model.chat_template,
        is_encoder_decoder=base.architecture.is_encoder_decoder,
    )
    return Tuned(
        base=base,
        adapter=adapter,
        folder=folder,
        tokenizer=tokenizer,
        template=template,
        stop_ids=stop_ids | template.stop_token_ids,
    )


def save_from_checkpoint(config: TunedConfig, env: Environment, folder: Path) -> Path:
    """Write the adapter in a run's newest good checkpoint as a finished run would; no weight is
    read of a base that training left as it is.

    UserError where there is no such checkpoint, or it is of other weights than an adapter's.
    """
    run = load_run_config(Path(str(config.run)))
    if saves_whole_model(run.adapter):
        raise UserError(
            f"run={config.run} trains the weights themselves, so there is no adapter to merge: "
            f"finish it with python -m app.train resume={config.run}"
        )
    checkpoint, problems = checkpoints_of(Path(str(config.run))).newest_good()
    for problem in problems:
        log.warning("%s", problem)
    if checkpoint is None:
        raise UserError(f"run={config.run}: no good checkpoint is there to merge")
    base = open_base(config, env, run.adapter)
    keeps_base = not (isinstance(run.adapter, LoraConfig) and run.adapter.init in CHANGE_BASE)
    model: Any = build_model(
        config.model,
        QuantizationConfig() if keeps_base else config.quantization,
        base.backend,
        run.adapter,
        RecomputeConfig(mode="none"),
        env.precision,
        new_ids=base.new_ids,
        token_ids=base.trained_ids,
        on_meta=keeps_base,
    )
    trained = checkpoint.tensors(MODEL)
    restore_model(model, trained)
    if keeps_base:
        names = {id(weight): name for name, weight in model.named_parameters()}
        weights = trainable_parameters(model).items()
        save_adapter(model, folder, {names[id(weight)]: trained[name] for name, weight in weights})
    else:
        save_converted(model, folder)
    write_origin(folder, base.description)
    base.tokenizer.save_pretrained(folder)
    log.info("checkpoint: step %d of %s", checkpoint.step, config.run)
    return folder


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
        for line in (*data.report.lines(), *data.audit.lines()):
            log.info("data: %s", line)
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


def resolve_strategy(config: TrainConfig, base: Base, env: Environment) -> StrategyConfig:
    """Return the strategy of `config`, with `auto` chosen by the size of the model."""
    if config.strategy.name != "auto":
        return config.strategy
    choice = choose_strategy(
        gather_facts(
            env,
            config.trainer,
            config.optimizer,
            config.quantization,
            _shapes_builder(config, base, env),
        )
    )
    chosen: StrategyConfig = settings_of("strategy", choice.name)
    known = check_compatibility(config)
    found = check_compatibility(replace(config, strategy=chosen))
    if problems := [problem for problem in found if problem not in known]:
        raise UserError([f"strategy=auto is {choice}; but {problem}" for problem in problems])
    if is_first_rank():
        log.info("strategy: %s", choice)
    return chosen


def resolve_recompute(
    config: TrainConfig,
    base: Base,
    data: FinetuneDataModule,
    env: Environment,
    strategy: StrategyConfig,
) -> TrainConfig:
    """Return `config` with recompute=auto chosen by what fits a GPU; on a CPU it stays as it is."""
    if config.recompute.mode != "auto" or env.accelerator == "cpu":
        return config
    memory = _memory_of(config, base, data, env, strategy)(env.micro_batch_size)
    choice = choose_recompute(memory, every=config.recompute.every, compiles=config.trainer.compile)
    if is_first_rank():
        log.info("recompute: %s", choice)
    return replace(config, recompute=replace(config.recompute, mode=choice.mode))


def resolve_micro_batch(
    config: TrainConfig,
    base: Base,
    data: FinetuneDataModule,
    env: Environment,
    strategy: StrategyConfig,
    run: Run,
) -> Environment:
    """Return `env` with trainer.micro_batch_size=auto chosen, and have `data` take it.

    A resumed run takes its own again. What a GPU has room for is chosen by arithmetic; the module
    tries it. The packs of a step stay the same.
    """
    if config.trainer.micro_batch_size != "auto":
        return env
    is_tried = False
    if run.checkpoint is not None:
        before = read_manifest(run.folder)["global_batch"]
        now = describe_global_batch(config.trainer, env.num_data_ranks, before)
        choice = MicroBatchChoice(now["micro_batch_size"], "as the run that is resumed")
    elif config.data.streaming:
        choice = MicroBatchChoice(1, "the order of a stream depends on it")
    elif env.accelerator == "cpu":
        choice = MicroBatchChoice(1, "more are for a GPU, whose memory says how many")
    else:
        is_tried = can_try(strategy)
        choice = choose_micro_batch(
            _memory_of(config, base, data, env, strategy),
            env.packs_of_rank,
            config.recompute,
            compiles=config.trainer.compile,
            is_tried=is_tried,
        )
    if is_first_rank():
        log.info("micro-batch: %s", choice)
    data.take_together(choice.size)
    env = env.with_micro_batch(choice.size)
    return replace(env, tries_micro_batch=is_tried and choice.size > 1)


def _memory_of(
    config: TrainConfig,
    base: Base,
    data: FinetuneDataModule,
    env: Environment,
    strategy: StrategyConfig,
) -> Callable[[int], Memory]:
    """Return a function from packs at once to the memory that a GPU has for them and they take."""
    build = _shapes_builder(config, base, env)
    footprint = build and measure_footprint(build(), config.optimizer.name, config.quantization)

    def memory_of(packs: int) -> Memory:
        return gather_memory(
            env,
            strategy,
            config.trainer.num_nodes,
            footprint,
            widths_of(base.architecture),
            _what_is_kept(config, base, packs * data.sequence_len, env),
        )

    return memory_of


def _what_is_kept(config: TrainConfig, base: Base, tokens: int, env: Environment) -> Kept:
    """Return what changes the activations of a micro-batch of `tokens` on one device."""
    adapter, trainer = config.adapter, config.trainer
    is_pair = base.architecture.is_encoder_decoder
    has_liger = trainer.kernels == "auto" and find_spec("liger_kernel") is not None
    return Kept(
        tokens=tokens * (2 if is_pair else 1),
        width=FP32 if env.precision == "fp32" else HALF,
        residual=base.dtype.itemsize,
        fuses_norm_and_gate=has_liger or trainer.compile,
        trains_base=saves_whole_model(adapter),
        drops=isinstance(adapter, LoraConfig) and adapter.dropout > 0,
        fuses_adapters=config.quantization.method != "int8"
        and not (isinstance(adapter, LoraConfig) and adapter.use_dora),
        keeps_scores=is_pair or base.backend == "eager",
    )


def describe_run(
    config: TrainConfig,
    base: Base,
    data: FinetuneDataModule,
    env: Environment,
    strategy: StrategyConfig,
) -> dict[str, Any]:
    """Return what the manifest says of a run, and what a resumed run is compared by."""
    return {
        "seed": config.seed,
        "base": base.description,
        "data": [asdict(dataset) for dataset in data.report.datasets],
        "test_data": [asdict(dataset) for dataset in data.report.test_datasets],
        "precision": env.precision,
        "strategy": strategy.name,
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
) -> L.Trainer:
    """Build the Lightning trainer of a run: strategy, loggers, checkpoints and callbacks.

    `facts` describe the run (`describe_run`); all ranks must agree on them.
    """
    config = run.config
    identity = run.identity(facts)
    resumed_step = None if run.checkpoint is None else run.step
    loggers = build_loggers(config.logger, run.folder, data.dataset_names, last_step=resumed_step)
    checkpoints = build_checkpoints(config.trainer.checkpoint, run.folder, run.checkpoint, identity)

    def write_metadata() -> None:
        run.discard_later_steps()
        # Behind it: a crash in between must not leave checkpoints without their rows.
        drop_rows_after(resumed_step, loggers)
        save_config(config, run.folder / CONFIG_FILE)
        data.write_reports(run.folder)
        write_manifest()

    def write_manifest() -> None:
        now = {**facts, "global_batch": _global_batch(data)}
        save_manifest(run.folder, **now, run=identity, earlier=run.history())

    callbacks: list[L.Callback] = [
        ProgressBar(),
        SameOnAllRanks(rank_invariant_values(config, facts)),
        GradientCheck(),
    ]
    if config.trainer.compile:
        # Imported here: the compiler takes a second to import.
        from app.training.callbacks.compilation import Compilation

        callbacks.append(Compilation())
    if is_watched():
        callbacks.append(Heartbeat(run.folder))
    has_validation = len(data.val_examples) > 0
    callbacks.append(
        build_saver(config.trainer, checkpoints, data.plan, has_validation=has_validation)
    )
    callbacks.append(
        WriteMetadata(write_metadata, write_manifest, is_resumed=run.checkpoint is not None)
    )
    trainer = build_lightning_trainer(
        config.trainer,
        env=env,
        strategy=build_strategy(strategy, accelerator=env.accelerator, num_ranks=env.num_ranks),
        total_steps=data.total_steps,
        loggers=loggers,
        callbacks=callbacks,
        folder=run.folder,
        checkpoints=checkpoints,
    )
    faults, _ = parse_faults(config.faults)
    arm(faults, run.folder, rank=trainer.global_rank, num_ranks=env.num_ranks)
    return trainer


def build_module(
    config: TrainConfig,
    base: Base,
    data: FinetuneDataModule,
    env: Environment,
    loggers: list[Logger],
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
    log.info("plan: %s; %s", data.plan.line(), lr.sentence)
    if lr.warning is not None and is_first_rank():
        log.warning(lr.warning)
    watch = StepWatch(trainer.max_skipped_steps, data.rows_of_step)
    return FinetuneModule(
        _model_builder(config, base, env),
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
        metrics=Metrics(data.dataset_names, loggers, trainer.log_every_steps, watch),
        uses_fused_kernels=trainer.kernels == "auto" and not trainer.compile,
        router_aux_loss=_router_aux_loss(config, base),
        try_micro_batch=partial(try_micro_batch, optimizer=config.optimizer.name)
        if env.tries_micro_batch
        else None,
    )


def _router_aux_loss(config: TrainConfig, base: Base) -> float:
    """Return the weight of the routers' own loss, and say what becomes of a mixture's routers."""
    if not has_experts(base.architecture):
        return 0.0
    if config.adapter.name != "full":
        log.info(
            "router: frozen, as the base chooses its experts (adapter=%s)", config.adapter.name
        )
        return 0.0
    stored = getattr(base.architecture.get_text_config(), "router_aux_loss_coef", None)
    typed = config.model.router_aux_loss
    weight = float((stored or 0.0) if typed is None else typed)
    whose = "config.json" if typed is None else "model.router_aux_loss"
    log.info("router: trains, auxiliary loss %g (%s)", weight, whose)
    return weight


def _shapes_builder(
    config: TrainConfig, base: Base, env: Environment
) -> Callable[[], torch.nn.Module] | None:
    """Return what builds the model on meta, not quantized; None where its files are quantized."""
    if stored_settings(base.architecture):
        return None
    return partial(
        _model_builder(config, base, env), quantization=QuantizationConfig(), on_meta=True
    )


def _model_builder(
    config: TrainConfig, base: Base, env: Environment
) -> Callable[..., torch.nn.Module]:
    return partial(
        build_model,
        config.model,
        quantization=config.quantization,
        backend=base.backend,
        adapter=config.adapter,
        recompute=config.recompute,
        precision=env.precision,
        new_ids=base.new_ids,
        token_ids=base.trained_ids,
    )
