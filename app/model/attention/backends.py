"""The attention that a person can choose, and what each of them cannot compute."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

BACKENDS = ("auto", "sdpa", "eager", "flash2")
BY_DOCUMENT = "sdpa_by_document"
"""the name under which transformers knows our attention function"""

COUNTS_POSITIONS = (
    "bart",
    "bigbird_pegasus",
    "blenderbot",
    "blenderbot-small",
    "fsmt",
    "led",
    "m2m_100",
    "marian",
    "mbart",
    "mvp",
    "nllb-moe",
    "pegasus",
    "pegasus_x",
    "plbart",
    "prophetnet",
)
"""model types that number the tokens of a row themselves, from its first one on"""
ALIBI = ("bloom", "mpt")
"""model types that build their bias of distances (ALiBi) from a mask of whole rows"""


@dataclass(kw_only=True, slots=True)
class AttentionConfig:
    backend: str = "auto"
    """auto: flash2 where CUDA and flash-attn are, else sdpa; eager: the slow reference"""


def choose_backend(
    config: AttentionConfig, architecture: PretrainedConfig, accelerator: str, precision: str
) -> str:
    """Resolve `auto` to the fastest backend that this model, device and precision can run.

    ValueError when the typed one cannot compute this model.
    """
    pairs = architecture.is_encoder_decoder
    model_class = _model_class(architecture)
    has_sdpa = model_class is None or (
        model_class._supports_sdpa and model_class._can_set_attn_implementation()
    )
    if config.backend == "sdpa" and not has_sdpa:
        raise ValueError(
            f"attention=sdpa: {architecture.model_type} models compute their attention themselves; "
            f"type attention=eager{' packing=none' if pairs else ''}"
        )
    if config.backend == "flash2" and pairs:
        raise ValueError(
            "attention=flash2 takes one set of boundaries for all layers, but "
            f"{architecture.model_type} models have an encoder and a decoder; type attention=sdpa"
        )
    if config.backend != "auto":
        return config.backend
    if not has_sdpa:
        return "eager"
    flash_installed = importlib.util.find_spec("flash_attn") is not None
    can_flash = accelerator == "gpu" and precision != "fp32" and flash_installed
    return "flash2" if can_flash and not pairs else "sdpa"


def _model_class(architecture: PretrainedConfig) -> Any:
    """Return the class that transformers has for an architecture, None for remote code."""
    from transformers.models.auto import modeling_auto

    known = (
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
        if architecture.is_encoder_decoder
        else modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    )
    return known.get(type(architecture), None)


def attention_implementation(backend: str) -> str:
    """Name of `backend` in transformers; registers ours there."""
    if backend == "sdpa":
        from transformers import AttentionInterface

        from app.model.attention.attend import attend_by_document

        # It has no mask function on purpose: transformers then builds no mask of its own.
        AttentionInterface.register(BY_DOCUMENT, attend_by_document)
    return {"sdpa": BY_DOCUMENT, "eager": "eager", "flash2": "flash_attention_2"}[backend]


def why_not_packed(numbers: Mapping[str, Any]) -> str | None:
    """Say why a model with these config.json `numbers` cannot be packed; None where it may be."""
    model_type = numbers.get("model_type")
    if model_type in COUNTS_POSITIONS:
        return (
            f"{model_type} models number the tokens of a row themselves, so that the second "
            "document of a pack would begin at a wrong position: type packing=none"
        )
    if model_type in ALIBI or (model_type == "falcon" and numbers.get("alibi")):
        return (
            f"{model_type} models with ALiBi weigh distances over a whole row, and take no mask "
            "that keeps the documents of a pack apart: type packing=none"
        )
    return None


@contextmanager
def generation_attention(model: torch.nn.Module) -> Iterator[None]:
    """Let `model.generate` use transformers' own attention, which knows caches and left padding."""
    from transformers import PreTrainedModel

    # Encoder and decoder have a config each.
    changed = [
        module
        for module in model.modules()
        if isinstance(module, PreTrainedModel) and module.config._attn_implementation == BY_DOCUMENT
    ]
    for module in changed:
        module.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        for module in changed:
            module.set_attn_implementation(BY_DOCUMENT)
