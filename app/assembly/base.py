"""Open the base model of a run, or a trained model, without its weights; build a verb's data.

A trained model is the result of a run, or one of its checkpoints, saved as a finished run saves its
result.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from app.config import EvaluateConfig, TrainConfig, TunedConfig, load_config, load_run_config
from app.model.adapter import (
    AdapterConfig,
    FreezeConfig,
    FullConfig,
    LoraConfig,
    apply_adapter,
    is_adapter,
    saves_whole_model,
)
from app.model.architecture import (
    MULTI_LABEL,
    base_commit,
    context_len,
    decoder_start_token_id,
    has_reward,
    load_architecture,
    output_names,
)
from app.model.attention import (
    attention_implementation,
    choose_backend,
    generation_attention,
    packing_error,
)
from app.model.base import ModelConfig, check_described, load_base
from app.model.build import apply_streaming, build_model, load_tuned, weight_dtype
from app.model.description import BaseDescription
from app.model.quantization import QuantizationConfig, stored_quantization
from app.model.rope import describe_context, describe_rope_factors
from app.model.tokenizer import (
    build_tokenizer,
    check_same_vocabulary,
    new_token_ids,
    num_rows,
    saved_stop_ids,
    stop_token_ids,
    trained_token_ids,
    with_chat_template,
)
from app.preflight import describe_base
from app.preflight.couplings.devices import has_data
from app.preflight.couplings.settings import CHANGE_BASE
from app.preflight.files import check_recompute, check_split
from app.process.launch import is_child, is_first_rank
from app.run.find import FINAL, select_checkpoint
from app.strategy.settings import pipeline_parallel_size
from app.training.checkpoint.documents import MODEL, OPTIMIZER, TRAINING
from app.training.objective import settings as objectives
from app.training.objective.distill import Distill, Teacher
from app.training.objective.objective import Classify, Objective, Reward, Sft
from app.training.objective.pairs import PAIR_LOSSES, Kto, PairObjective
from app.training.optimizers import ScheduleFreeConfig
from app.training.trainer import Environment, resolve_single_device
from common.errors import UserError
from data_modules import (
    DEFAULT_SEQUENCE_LEN,
    BatchSpec,
    ChatTemplate,
    DataSpec,
    FinetuneDataModule,
    ModelSpec,
    Turn,
    dataset_names,
    with_format,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from app.config import TrainConfig
    from app.evaluation.conversation import Responder
    from app.run import Run
    from app.strategy.mixin import Placement
    from app.training.checkpoint.checkpoint import Checkpoint

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """A base model whose weights are not loaded yet."""

    config: ModelConfig
    quantization: QuantizationConfig
    architecture: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    backend: str
    """attention backend"""
    spec: ModelSpec
    """what data preparation needs to know about the model"""
    dtype: torch.dtype
    """dtype of its weights in memory"""
    tuned_dtype: torch.dtype
    """dtype in which a whole tuned model is loaded, so that no trained weight is rounded"""
    new_ids: list[int]
    """token ids without a trained row in the embedding"""
    trained_ids: list[int]
    """token ids whose embedding rows are trained with an adapter"""
    stop_ids: set[int]
    """token ids that end an answer, besides those of the chat template"""
    description: Mapping[str, str | None]
    """path, revision and fingerprints, for the manifest"""
    teacher: Teacher | None = None
    """None unless objective=distill"""

    def load(self, device: torch.device | None = None) -> PreTrainedModel:
        """Load the base itself, without an adapter, to `device`."""
        model = load_base(
            self.config,
            attention_implementation(self.backend),
            self.dtype,
            self.quantization,
            self.new_ids,
            device=device,
        )
        apply_streaming(model.requires_grad_(False), self.config, device)
        return model

    def load_tuned(self, folder: Path, device: torch.device | None = None) -> torch.nn.Module:
        """Load a trained model: the adapter in `folder` on this base, or the whole model in it."""
        return load_tuned(
            self.config,
            folder,
            attention_implementation(self.backend),
            self.dtype if is_adapter(folder) else self.tuned_dtype,
            self.quantization,
            self.new_ids,
            device=device,
        )

    def model_builder(
        self, config: TrainConfig, env: Environment
    ) -> Callable[..., torch.nn.Module]:
        """Return a function that builds the model to train."""
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
        """Return a function that builds the model on meta; None if its files are quantized."""
        if stored_quantization(self.architecture):
            return None
        build = self.model_builder(config, env)
        return partial(build, quantization=QuantizationConfig(), on_meta=True)


def open_base(config: TrainConfig | TunedConfig, env: Environment, adapter: AdapterConfig) -> Base:
    """Read config and tokenizer of the base, and choose its attention; reads no weights.

    Sets `model.revision` to the commit that a base on the hub was read at. UserError if the base
    does not fit `config` or the environment.
    """
    model = config.model
    if model.stream is not None and saves_whole_model(adapter):  # dtypes differ by weight
        raise UserError(
            f"model.stream={model.stream} streams a frozen base, and adapter={adapter.name} has "
            "trained it; type model.stream=null"
        )
    architecture = load_architecture(model)
    check_described(model, architecture)
    model.revision = base_commit(model) or model.revision  # branches and tags of the hub move
    attention = choose_backend(config.attention, architecture, env.accelerator, env.precision)
    if isinstance(config, TrainConfig):  # of a base on the hub, nothing was known before
        known = BaseDescription(name=str(model.path), config=architecture.to_dict())
        problems = check_recompute(config.recompute, known)
        problems += check_split(config.strategy, known, attention.backend)
        if problems:
            raise UserError(problems)
    if extended := describe_context(model, architecture):
        log.info("%s", extended)
    rope_len = model.rope_len or model.context_len or _longest_sequence(config)
    if rope := describe_rope_factors(architecture, rope_len):
        log.info("%s", rope)
    if env.context_size > env.devices:
        log.warning(
            "strategy.context_parallel_size=%d splits rows over %d nodes, which wait for the "
            "network in every layer: strategy.context_parallel_size=%d stays inside a node",
            env.context_size,
            -(-env.context_size // env.devices),
            env.devices,
        )
    log.info("device: %s, attention %s", env, attention)
    tokenizer = build_tokenizer(model)
    new_ids = new_token_ids(model, tokenizer, num_rows(architecture))
    teacher = None
    if has_data(config) and isinstance(config.objective, objectives.DistillConfig):
        teacher = _open_teacher(config, config.objective, architecture, tokenizer, env)
    return Base(
        config=replace(model, rope_len=rope_len),
        quantization=config.quantization,
        architecture=architecture,
        tokenizer=tokenizer,
        backend=attention.backend,
        dtype=weight_dtype(env.precision, adapter),
        tuned_dtype=weight_dtype(env.precision, FullConfig()),
        spec=model_spec(architecture, new_ids, attention.backend),
        new_ids=new_ids,
        trained_ids=trained_token_ids(tokenizer, model.added_tokens, adapter),
        stop_ids=stop_token_ids(tokenizer, model.stop_tokens),
        description=describe_base(model),
        teacher=teacher,
    )


def _open_teacher(
    config: TrainConfig | EvaluateConfig,
    objective: objectives.DistillConfig,
    student: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    env: Environment,
) -> Teacher:
    """Open the teacher; reads no weights.

    UserError unless it reads the student's tokens, and as many of them.
    """
    name, longest = f"objective.teacher={objective.teacher}", _longest_sequence(config)
    model = ModelConfig(path=objective.teacher, rope_len=longest)
    architecture = load_architecture(model)
    model.revision = base_commit(model)
    if architecture.is_encoder_decoder != student.is_encoder_decoder:
        raise UserError(
            f"{name}: {architecture.model_type} and the base's {student.model_type} are not both "
            "encoder-decoders; type a teacher of the base's kind"
        )
    context, own = context_len(architecture), context_len(student)
    if longest and context and min(longest, own or longest) > context:
        raise UserError(
            f"{name} reads {context:,} tokens, and rows of data.sequence_len={longest} may be "
            f"longer; type data.sequence_len={context}"
        )
    check_same_vocabulary(tokenizer, build_tokenizer(model), name)
    backend = choose_backend(config.attention, architecture, env.accelerator, env.precision).backend

    def build(*, on_meta: bool = False, **where: Any) -> PreTrainedModel:
        import torch

        with torch.device("meta") if on_meta else nullcontext():
            teacher = load_base(
                model,
                attention_implementation(backend),
                weight_dtype(env.precision, LoraConfig()),
                QuantizationConfig(method=objective.teacher_quantization),
                on_meta=on_meta,
                **where,
            )
        return teacher.requires_grad_(False)

    def load(device: torch.device, placement: Placement | None) -> tuple[PreTrainedModel, str]:
        from app.model.attention.probes import check_isolation

        teacher = placement.build_frozen(build) if placement else build(device=device)
        if not architecture.is_encoder_decoder:
            check_isolation(teacher, backend, device)
        return teacher, backend

    parts = [sorted(describe_base(model).items()), model.rope_len, objective.teacher_quantization]
    identity = repr([*parts, backend, env.precision])
    return Teacher(load, num_rows(architecture), identity)


def _longest_sequence(config: TrainConfig | TunedConfig) -> int | None:
    """Return the most tokens of a sequence in training; None without a run and its settings."""
    if isinstance(config, TrainConfig):
        return config.data.sequence_len or DEFAULT_SEQUENCE_LEN
    if config.run is not None and config.adapter_path is None:
        return _longest_sequence(load_run_config(Path(config.run)))
    return None


def build_objective(
    config: objectives.ObjectiveConfig,
    model: ModelConfig | None = None,
    teacher: Teacher | None = None,
) -> Objective:
    """Build the objective that `config` chooses.

    `model`: names the outputs of a head for classes; `teacher`: for objective=distill.
    """
    if isinstance(config, objectives.ClassifyConfig):
        assert model is not None
        return Classify(config, model.labels, is_multi_label=model.multi_label)
    if isinstance(config, objectives.DistillConfig):
        assert teacher is not None
        return Distill(config, teacher)
    if config.name in PAIR_LOSSES:
        return PairObjective(config, PAIR_LOSSES[config.name])
    if isinstance(config, objectives.KtoConfig):
        return Kto(config)
    return Reward(config) if isinstance(config, objectives.RewardConfig) else Sft()


def model_spec(
    architecture: PretrainedConfig, new_ids: Sequence[int], backend: str = "auto"
) -> ModelSpec:
    """Return what data preparation needs to know about a model with rows for `new_ids`."""
    return ModelSpec(
        context_len=context_len(architecture),
        vocab_size=num_rows(architecture, new_ids),
        decoder_start_token_id=decoder_start_token_id(architecture),
        labels=output_names(architecture),
        is_multi_label=architecture.problem_type == MULTI_LABEL,
        packing_error=packing_error(architecture.to_dict(), backend),
    )


def build_datamodule(
    config: TrainConfig | EvaluateConfig,
    tokenizer: PreTrainedTokenizerBase,
    spec: ModelSpec,
    batching: BatchSpec,
    *,
    first_rows: int | None = None,
) -> FinetuneDataModule:
    """Build the data module of a verb; the caller calls its `setup`."""
    data = with_format(config.data, config.objective.row_format)
    data = with_chat_template(data, config.model, tokenizer)
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


def batch_spec(config: TrainConfig, env: Environment) -> BatchSpec:
    """Return how rows become the steps of a training run under its strategy."""
    trainer = config.trainer
    return BatchSpec(
        micro_batch_size=env.micro_batch_size,
        accumulation_steps=env.accumulation,
        num_ranks=env.num_data_ranks,
        num_epochs=trainer.num_epochs,
        max_steps=trainer.max_steps,
        row_multiple=env.row_multiple,
        row_slices=env.context_size,
        # Compiled layers need batches of one size, as do messages between pipeline stages.
        pad_packs=trainer.compile or pipeline_parallel_size(config.strategy) > 1,
    )


def build_data(config: TrainConfig, base: Base, env: Environment, run: Run) -> FinetuneDataModule:
    """Prepare, audit and plan the data of all steps of a training run, before weights are read."""
    data = build_datamodule(config, base.tokenizer, base.spec, batch_spec(config, env))
    data.first_step = run.step
    data.setup("fit")
    if config.evaluation.exact_match:
        data.prompts(config.evaluation.max_rows)  # warns about prompts that are too long
    if is_first_rank():
        for line in data.summary():
            log.info("%s", line)
        for line in (*data.report.lines(), *data.audit.notes()):
            log.debug("data: %s", line)
        data.audit.check()
    return data


C = TypeVar("C", bound=TunedConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """A base with its trained adapter or weights, and the chat template of its training."""

    base: Base
    adapter: AdapterConfig
    folder: Path | None
    """folder of the adapter or the whole model; None for the base alone"""
    tokenizer: PreTrainedTokenizerBase
    """the tokenizer saved by the training run, with its chat template"""
    template: ChatTemplate
    stop_ids: set[int]
    """token ids that end an answer"""

    def load(self, env: Environment) -> torch.nn.Module:
        """Load the tuned model in evaluation mode on the device of `env`."""
        device = env.rank_device
        if self.folder is None:
            model: torch.nn.Module = self.base.load(device)
        else:
            model = self.base.load_tuned(self.folder, device)
        return place_as_trained(model, self.adapter, env).eval()

    def responder(self, model: torch.nn.Module, env: Environment) -> Responder:
        """Build the responder of `model`, with the chat template and stops of its training."""
        from app.evaluation.conversation import Responder

        return Responder(
            model.eval(),
            self.tokenizer,
            self.template,
            self.stop_ids,
            context_len=self.base.spec.context_len,
            autocast=env.autocast,
        )


def open_tuned(config: TunedConfig, env: Environment) -> Tuned:
    """Open a base, and the tokenizer and stop tokens saved by its training; reads no weights.

    UserError if a run's adapter or model no longer exists.
    """
    adapter = adapter_of(config)
    folder = None if config.tuned_path is None else Path(config.tuned_path)
    if folder and not is_adapter(folder) and not (folder / "config.json").is_file():
        raise UserError(f"run={config.run}: {folder} has neither an adapter nor a model")
    base = open_base(config, env, adapter)
    tokenizer, stop_ids = base.tokenizer, set(base.stop_ids)
    if folder is not None and (folder / "tokenizer_config.json").is_file():
        tokenizer = build_tokenizer(ModelConfig(path=str(folder)))
        rows = num_rows(base.architecture, base.new_ids)
        stop_ids |= saved_stop_ids(folder, max(rows, len(tokenizer)))
    template = ChatTemplate.resolve(
        tokenizer,
        None if tokenizer.chat_template else base.config.chat_template,
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


def adapter_of(config: TunedConfig) -> AdapterConfig:
    """Return the adapter settings of the training, which determine the dtypes of the weights."""
    if config.is_of_run:
        return load_run_config(Path(str(config.run))).adapter
    is_lora = config.tuned_path is None or is_adapter(Path(config.tuned_path))
    return LoraConfig() if is_lora else FullConfig()


def open_reward_model(
    path: str | None, accelerator: str
) -> Callable[[Sequence[Sequence[Turn]]], list[float]] | None:
    """Return a function that loads a reward model, and rates the last answers of conversations.

    `path`: `evaluation.judge.reward_model`, None for none. UserError if it is something else.
    """
    if path is None:
        return None
    folder = Path(path)
    is_run = folder.is_dir() and not (folder / "config.json").is_file()
    named = {"run": path} if is_run else {"model.path": path, "objective": "reward"}
    config = load_config("evaluate", named | {"trainer.accelerator": accelerator})
    assert isinstance(config, EvaluateConfig)
    is_whole = is_run or has_reward(load_architecture(ModelConfig(path=path)))
    if config.objective.name != "reward" or not is_whole:
        raise UserError(
            f"evaluation.judge.reward_model={path} has no head for a reward; type the folder of a "
            "run of objective=reward, or of a sequence classifier with one output"
        )
    env = resolve_single_device(accelerator, config.trainer.precision)
    return partial(_rate, open_tuned(config, env), env)


def _rate(tuned: Tuned, env: Environment, conversations: Sequence[Sequence[Turn]]) -> list[float]:
    import torch

    rows = [tuned.template.answered_ids(turns) for turns in conversations]
    longest, context = max(map(len, rows)), tuned.base.spec.context_len
    if context is not None and longest > context:
        raise UserError(
            f"evaluation.judge.reward_model reads {context:,} tokens, and a conversation has "
            f"{longest:,}; type a smaller evaluation.judge.max_new_tokens"
        )
    model: Any = tuned.load(env)
    with torch.no_grad(), env.autocast(), generation_attention(model):
        ids = [torch.tensor([row], device=env.rank_device) for row in rows]
        return [model(input_ids=row, logits_to_keep=1).logits.item() for row in ids]


def place_as_trained(model: Any, adapter: AdapterConfig, env: Environment) -> torch.nn.Module:
    """Give a loaded model the dtypes of its training, and move it to the device of `env`."""
    if isinstance(adapter, FreezeConfig):  # the trained layers have another dtype than the frozen
        model = apply_adapter(model, adapter, half_precision=env.precision == "bf16-pure")
        for weight in model.parameters():
            if not weight.requires_grad:
                weight.data = weight.data.to(weight_dtype(env.precision, adapter))
    placed: torch.nn.Module = model.to(env.rank_device)
    return placed


def trained_datasets(config: EvaluateConfig) -> set[str] | None:
    """Return the names of the data sets that the evaluated run was trained on, by name or path.

    None if no run is evaluated.
    """
    if not config.is_of_run:
        return None
    of_run = load_run_config(Path(str(config.run))).data.datasets
    trained, paths = set(dataset_names(of_run)), {dataset.path for dataset in of_run}
    for datasets in (config.data.loss_datasets, config.data.test_datasets):
        named = zip(dataset_names(datasets), datasets, strict=True)
        trained |= {name for name, dataset in named if dataset.path in paths}
    return trained


def with_checkpoint(config: C, env: Environment, folder: Path) -> C:
    """Return `config` with the run's checkpoint, saved under `folder`, as its tuned model.

    With the run's own result it is unchanged. UserError if there is no such checkpoint.
    """
    if config.checkpoint == FINAL:
        return config
    source = Path(str(config.run))
    checkpoint, run = select_checkpoint(source, config.checkpoint), load_run_config(source)
    kind = "model" if saves_whole_model(run.adapter) else "adapter"
    saved = folder / f"{kind}-step-{checkpoint.step}"
    if is_first_rank() and not is_child() and saved.is_dir():
        shutil.rmtree(saved)  # left by a process that was killed, perhaps of another run
    if not saved.is_dir():  # by the process that started this one
        unfinished = saved.with_name(f"{saved.name}.{os.getpid()}")
        _save_step(config, env, run, checkpoint, unfinished)
        unfinished.rename(saved)
    log.info("checkpoint: step %d of %s", checkpoint.step, config.run)
    return replace(config, adapter_path=str(saved))


def _save_step(
    config: TunedConfig, env: Environment, run: TrainConfig, checkpoint: Checkpoint, folder: Path
) -> None:
    """Save the adapter or model of a checkpoint in `folder`.

    Reads no weights of the base for an adapter, unless its initialization changed them.
    """
    from app.model.adapter import save_adapter, save_converted, write_origin
    from app.model.quantization import QuantizationConfig
    from app.model.recompute import RecomputeConfig
    from app.model.save import trained_dtype, write_model
    from app.model.tokenizer_file import save_tokenizer
    from app.training.checkpoint.state import restore_model, trainable_parameters

    base = open_base(config, env, run.adapter)
    build = partial(base.model_builder(run, env), recompute=RecomputeConfig(mode="none"))
    trained = _averaged_weights(checkpoint, run)
    model: Any
    if saves_whole_model(run.adapter):
        model = build()
        restore_model(model, trained)
        write_model(model, folder, trained_dtype(model))
    elif isinstance(run.adapter, LoraConfig) and run.adapter.init in CHANGE_BASE:
        model = build()
        restore_model(model, trained)
        save_converted(model, folder)
    else:
        model = build(quantization=QuantizationConfig(), on_meta=True)
        restore_model(model, trained)
        names = {id(weight): name for name, weight in model.named_parameters()}
        weights = trainable_parameters(model).items()
        save_adapter(model, folder, {names[id(weight)]: trained[name] for name, weight in weights})
    if not saves_whole_model(run.adapter):
        write_origin(folder, base.description)
    save_tokenizer(base.tokenizer, folder)


def _averaged_weights(checkpoint: Checkpoint, run: TrainConfig) -> dict[str, Tensor]:
    """Return the weights that a checkpoint would be evaluated with.

    A step of schedule-free AdamW without a validation was saved with the weights that gradients are
    taken at; the state `z` of the optimizer turns them into the average.
    """
    weights = checkpoint.tensors(MODEL)
    groups = checkpoint.document(TRAINING)["optimizer"]["groups"]
    is_averaged = not any(group.get("train_mode") for group in groups)
    if is_averaged or not isinstance(run.optimizer, ScheduleFreeConfig):
        return weights
    newest = {
        name.removeprefix("z/"): tensor
        for name, tensor in checkpoint.tensors(OPTIMIZER).items()
        if name.startswith("z/")
    }
    share = 1 - 1 / run.optimizer.beta1
    return {
        name: weight.lerp(newest[name].to(weight.dtype), share) if name in newest else weight
        for name, weight in weights.items()
    }
