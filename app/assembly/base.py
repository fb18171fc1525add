"""Open the base model of a run, everything about it except its weights, and build a verb's data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.config import EvaluateConfig, TrainConfig, TunedConfig, load_run_config
from app.model.adapter import (
    AdapterConfig,
    FullConfig,
    LoraConfig,
    is_adapter,
    saves_whole_model,
)
from app.model.architecture import (
    base_commit,
    context_len,
    decoder_start_token_id,
    load_architecture,
)
from app.model.attention import attention_implementation, choose_backend, packing_error
from app.model.base import ModelConfig, check_described, load_base
from app.model.build import apply_streaming, build_model, load_tuned, weight_dtype
from app.model.classifier import MULTI_LABEL, output_names
from app.model.description import BaseDescription
from app.model.quantization import QuantizationConfig, stored_quantization
from app.model.rope import describe_context, describe_rope_factors
from app.model.tokenizer import (
    build_tokenizer,
    check_same_vocabulary,
    new_token_ids,
    num_rows,
    stop_token_ids,
    trained_token_ids,
    with_chat_template,
)
from app.preflight import describe_base
from app.preflight.couplings import has_data
from app.preflight.files import check_recompute, check_split
from app.process.launch import is_first_rank
from app.strategy.settings import pipeline_parallel_size
from app.training.objective.distill import Teacher
from app.training.objective.settings import DistillConfig
from app.training.trainer import Environment
from common.errors import UserError
from data_modules import (
    DEFAULT_SEQUENCE_LEN,
    BatchSpec,
    DataSpec,
    FinetuneDataModule,
    ModelSpec,
    with_format,
)

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from app.run import Run
    from app.strategy.mixin import Placement

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
    _check_stream(model, adapter)
    architecture = load_architecture(model)
    check_described(model, architecture)
    model.revision = base_commit(model) or model.revision  # branches and tags of the hub move
    attention = choose_backend(config.attention, architecture, env.accelerator, env.precision)
    if isinstance(config, TrainConfig):  # of a base on the hub, nothing was known before
        known = BaseDescription(name=str(model.path), config=architecture.to_dict())
        problems = check_recompute(config.recompute.every, known)
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
    if has_data(config) and isinstance(config.objective, DistillConfig):
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


def _check_stream(model: ModelConfig, adapter: AdapterConfig) -> None:
    """Raise UserError if a whole trained model would be streamed, whose dtypes differ by weight."""
    if model.stream is not None and saves_whole_model(adapter):
        raise UserError(
            f"model.stream={model.stream} streams a frozen base, and adapter={adapter.name} has "
            "trained it; type model.stream=null"
        )


def _open_teacher(
    config: TrainConfig | EvaluateConfig,
    objective: DistillConfig,
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
