"""Build the model that is trained, in the one legal order."""

from __future__ import annotations

import logging
from collections.abc import Sequence
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
    verify_adapter,
)
from app.model.attention import attention_implementation
from app.model.recompute import RecomputeConfig, apply_recompute

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
    from_scratch: bool = False
    """start from random weights of `architecture` instead of a trained base"""
    architecture: dict[str, Any] = field(default_factory=dict)
    """the config.json numbers of this model: lets checks and plans run without a download"""


def build_model(
    config: ModelConfig,
    backend: str,
    adapter: AdapterConfig,
    recompute: RecomputeConfig,
    precision: str,
) -> torch.nn.Module:
    """Build base + adapter, ready to train on the CPU; `precision` is a resolved name."""
    # 1. Attention is named while loading: the model's layers look it up in their config.
    implementation = attention_implementation(backend)
    # 2. Weights, in the dtype they are kept in while training.
    model = load_base(config, implementation, weight_dtype(precision, adapter))
    # 3. Recompute before the adapter: it switches on the base's layers, which peft then wraps.
    apply_recompute(model, recompute)
    # 4. The adapter last: it freezes what is there and adds what trains.
    adapted = apply_adapter(model, adapter, half_precision=precision == "bf16-pure")
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


def load_base(config: ModelConfig, implementation: str, dtype: torch.dtype) -> PreTrainedModel:
    """Load a base model's weights, or make random ones of `config.architecture`."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # a bar a file says less than our one line
    if config.from_scratch:
        return AutoModelForCausalLM.from_config(
            load_architecture(config), attn_implementation=implementation, dtype=dtype
        )
    model, loading = AutoModelForCausalLM.from_pretrained(
        config.path,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
        attn_implementation=implementation,
        dtype=dtype,
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
    return model


def load_tuned(
    config: ModelConfig, tuned: Path, implementation: str, dtype: torch.dtype
) -> torch.nn.Module:
    """Load what a run saved in `tuned`: an adapter on the base of `config`, or a full model."""
    if is_adapter(tuned):
        return load_adapter(load_base(config, implementation, dtype), tuned)
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


def save_model(
    model: Any,
    adapter: AdapterConfig,
    architecture: PretrainedConfig,
    folder: Path,
    probe_ids: Sequence[int],
) -> Path:
    """Save what was trained under `folder`, reopen it and compare; return the written folder.

    Adapters go to `adapter/` in peft's format, full models to `model/` as a Hugging Face folder in
    the dtype the base came in. The logits of `probe_ids` are compared. TrainingFault when what is
    on disk is not what is in memory.
    """
    import torch

    probe = torch.tensor([list(probe_ids)], device=model.device)
    try:
        if isinstance(adapter, FullConfig):
            saved = folder / "model"
            difference = _save_full(model, architecture, saved, probe)
        else:
            saved = folder / "adapter"
            save_adapter(model, saved)
            difference = verify_adapter(model, saved, probe)
    except ValueError as error:
        raise TrainingFault(f"what was saved does not read back: {error}") from error
    log.info("saved and reopened: same logits (largest difference %.1e)", difference)
    return saved


def _save_full(
    model: PreTrainedModel, architecture: PretrainedConfig, folder: Path, probe: torch.Tensor
) -> float:
    from transformers import AutoModelForCausalLM

    kept = model.dtype
    _cast_weights(model, architecture.dtype or kept)
    model.save_pretrained(folder)
    reopened = AutoModelForCausalLM.from_pretrained(
        folder, dtype=model.dtype, attn_implementation=model.config._attn_implementation
    ).to(probe.device)
    in_memory, on_disk = probe_logits(model, probe), probe_logits(reopened, probe)
    # What is measured after this is the saved model, computed as it was in training.
    _cast_weights(model, kept)
    return check_same_logits(in_memory, on_disk, folder)


def _cast_weights(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast the parameters alone: `model.to` would round the rotary frequencies as well."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
