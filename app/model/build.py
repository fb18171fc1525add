"""Build the model that is trained, in the one legal order."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.errors import TrainingFault, UserError
from app.model.adapter import (
    AdapterConfig,
    FullConfig,
    apply_adapter,
    check_same_logits,
    is_adapter,
    load_adapter,
    probe_logits,
    report_trainable,
    save_adapter,
    saves_whole_model,
    verify_adapter,
)
from app.model.attention import attention_implementation
from app.model.neftune import apply_neftune
from app.model.quantization import QuantizationConfig, prepare_quantized, quantization_settings
from app.model.recompute import RecomputeConfig, apply_recompute
from app.model.tokens import resize_embeddings

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    path: str | None = None
    """folder or hub id of the base model (config.json, safetensors, tokenizer)"""
    revision: str | None = None
    """hub commit, tag or branch; pins what is downloaded"""
    trust_remote_code: bool = False
    """run Python files that come with the model; only together with a pinned revision"""
    tokenizer_path: str | None = None
    """folder or hub id of the tokenizer, where it is not the model's own"""
    added_tokens: list[str] = field(default_factory=list)
    """special tokens that are new to this base, as [<|im_start|>, <|im_end|>]; their rows train"""
    from_scratch: bool = False
    """start from random weights of `architecture` instead of a trained base"""
    architecture: dict[str, Any] = field(default_factory=dict)
    """the config.json numbers of this model: lets checks and plans run without a download"""


def build_model(
    config: ModelConfig,
    quantization: QuantizationConfig,
    backend: str,
    adapter: AdapterConfig,
    recompute: RecomputeConfig,
    precision: str,
    *,
    num_tokens: int = 0,
    token_ids: Sequence[int] = (),
) -> torch.nn.Module:
    """Build base + adapter, ready to train on the CPU; `precision` is a resolved name.

    The embedding gets at least `num_tokens` rows; the rows `token_ids` train with an adapter.
    """
    # 1. Attention is named while loading: the model's layers look it up in their config.
    implementation = attention_implementation(backend)
    # 2. Weights, in the dtype they are kept in while training, quantized as they are read.
    dtype = weight_dtype(precision, adapter)
    model = load_base(config, implementation, dtype, quantization, num_tokens)
    # 3. Recompute before the adapter: it switches on the base's layers, which peft then wraps.
    apply_recompute(model, recompute)
    # 4. The adapter last: it freezes what is there and adds what trains.
    adapted = apply_adapter(
        model, adapter, half_precision=precision == "bf16-pure", token_ids=token_ids
    )
    apply_neftune(adapted, adapter.neftune_alpha)
    adapted.train()
    log.info("model: %s", report_trainable(adapted))
    return adapted


def weight_dtype(precision: str, adapter: AdapterConfig) -> torch.dtype:
    """Dtype that weights are kept in: under autocast trained ones are fp32, frozen ones are not."""
    import torch

    if precision == "bf16-pure":
        return torch.bfloat16
    if precision == "fp32" or isinstance(adapter, FullConfig):
        return torch.float32
    return {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]


def load_base(
    config: ModelConfig,
    implementation: str,
    dtype: torch.dtype,
    quantization: QuantizationConfig | None = None,
    num_tokens: int = 0,
) -> PreTrainedModel:
    """Load a base model's weights, or make random ones of `config.architecture`.

    The embedding gets at least `num_tokens` rows.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # a bar a file says less than our one line
    architecture = load_architecture(config)
    auto_class = model_class(architecture)
    if config.from_scratch:
        model = auto_class.from_config(
            architecture, attn_implementation=implementation, dtype=dtype
        )
        resize_embeddings(model, num_tokens)
        return model
    quantization = quantization or QuantizationConfig()
    model, loading = auto_class.from_pretrained(
        config.path,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
        attn_implementation=implementation,
        dtype=dtype,
        quantization_config=quantization_settings(quantization, dtype),
        use_safetensors=True,
        output_loading_info=True,
    )
    # transformers fills what a file lacks with random numbers and goes on.
    for problem in ("missing_keys", "mismatched_keys"):
        if names := sorted(map(str, loading[problem])):
            raise UserError(
                f"model.path={config.path}: {problem.replace('_keys', '')} tensors in its files: "
                f"{len(names)}, first {names[0]}; copy or download the model again"
            )
    resize_embeddings(model, num_tokens)
    if quantization.method != "none":
        prepare_quantized(model)
    return model


def model_class(architecture: PretrainedConfig) -> Any:
    """Return the auto class that loads an architecture: encoder-decoder, or causal."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    return AutoModelForSeq2SeqLM if architecture.is_encoder_decoder else AutoModelForCausalLM


def load_tuned(
    config: ModelConfig,
    tuned: Path,
    implementation: str,
    dtype: torch.dtype,
    quantization: QuantizationConfig | None = None,
    num_tokens: int = 0,
) -> torch.nn.Module:
    """Load what a run saved in `tuned`: an adapter on the base of `config`, or a whole model."""
    if is_adapter(tuned):
        base = load_base(config, implementation, dtype, quantization, num_tokens)
        return load_adapter(base, tuned)
    return load_base(ModelConfig(path=str(tuned)), implementation, dtype)


def load_architecture(config: ModelConfig) -> PretrainedConfig:
    """Read the model's config.json, or make it from `config.architecture` when from scratch."""
    import transformers
    from transformers import AutoConfig

    if config.from_scratch:
        numbers = dict(config.architecture)
        return AutoConfig.for_model(numbers.pop("model_type"), **numbers)
    numbers, _ = transformers.PreTrainedConfig.get_config_dict(
        config.path, revision=config.revision
    )
    model_type = numbers.get("model_type")
    if model_type not in transformers.CONFIG_MAPPING and not config.trust_remote_code:
        raise UserError(
            f"model.path={config.path}: transformers {transformers.__version__} does not know "
            f"its model_type {model_type!r}; take a newer transformers, or another base"
        )
    return AutoConfig.from_pretrained(
        config.path, revision=config.revision, trust_remote_code=config.trust_remote_code
    )


def context_len(architecture: PretrainedConfig) -> int | None:
    """Tokens that a model was made for; None where its positions have no end (BLOOM, MPT)."""
    return architecture.get_text_config().to_dict().get("max_position_embeddings")


def decoder_start_token_id(architecture: PretrainedConfig) -> int | None:
    """Return what a decoder begins each answer with; None for causal models."""
    if not architecture.is_encoder_decoder:
        return None
    start: int = architecture.decoder_start_token_id
    return start


def save_model(
    model: Any,
    adapter: AdapterConfig,
    architecture: PretrainedConfig,
    folder: Path,
    probe: Mapping[str, Sequence[int]],
) -> Path:
    """Save what was trained under `folder`, reopen it and compare; return the written folder.

    Adapters go to `adapter/` in peft's format, full models to `model/` as a Hugging Face folder in
    the dtype the base came in. The logits of `probe`, token ids by name of the model's argument,
    are compared. TrainingFault when what is on disk is not what is in memory.
    """
    import torch

    rows = {name: torch.tensor([list(ids)], device=model.device) for name, ids in probe.items()}
    try:
        if saves_whole_model(adapter):
            saved = folder / "model"
            difference = _save_whole(model, architecture, saved, rows)
        else:
            saved = folder / "adapter"
            save_adapter(model, saved)
            difference = verify_adapter(model, saved, rows)
    except ValueError as error:
        raise TrainingFault(f"what was saved does not read back: {error}") from error
    log.info("saved and reopened: same logits (largest difference %.1e)", difference)
    return saved


def _save_whole(
    model: PreTrainedModel,
    architecture: PretrainedConfig,
    folder: Path,
    probe: Mapping[str, torch.Tensor],
) -> float:
    kept = model.dtype
    _cast_weights(model, architecture.dtype or kept)
    model.save_pretrained(folder)
    reopened = (
        model_class(architecture)
        .from_pretrained(
            folder, dtype=model.dtype, attn_implementation=model.config._attn_implementation
        )
        .to(model.device)
    )
    in_memory, on_disk = probe_logits(model, probe), probe_logits(reopened, probe)
    # What is measured after this is the saved model, computed as it was in training.
    _cast_weights(model, kept)
    return check_same_logits(in_memory, on_disk, folder)


def _cast_weights(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast the parameters alone: `model.to` would round the rotary frequencies as well."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
