"""The attention that a person can choose, and its name in transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from app.model.attention.masks import build_mask_rule
from app.process.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

BACKENDS = ("auto", "flash2", "flash3", "varlen", "flex", "sdpa", "eager")
ON_GPU = ("flash2", "flash3", "varlen", "flex")
"""backends that train on NVIDIA GPUs alone"""
IN_HALF = ("flash2", "flash3", "varlen")
"""backends that compute in half precision alone"""
PACKAGES = {
    "flash2": ("flash_attn", "flash-attn"),
    "flash3": ("flash_attn_interface", "flash-attn-3"),
}
"""backends that come from elsewhere: the module that Python imports, and the package's name"""
BY_DOCUMENT = "sdpa_by_document"
BY_BOUNDARIES = "varlen_by_boundaries"
BY_BLOCKS = "flex_attention_by_blocks"
"""the names under which transformers knows our attention functions"""
IN_TRANSFORMERS = {
    "eager": "eager",
    "sdpa": BY_DOCUMENT,
    "varlen": BY_BOUNDARIES,
    "flex": BY_BLOCKS,
    "flash2": "flash_attention_2",
    "flash3": "flash_attention_3",
}
COUNTS_POSITIONS = (
    "bart",
    "bigbird_pegasus",
    "blenderbot",
    "blenderbot-small",
    "camembert",
    "data2vec-text",
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
    "roberta",
    "roberta-prelayernorm",
    "trocr",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
)
"""model types that number the tokens of a row themselves, from its first one on"""
RECURRENT = (
    "bailing_hybrid",
    "bamba",
    "falcon_h1",
    "falcon_mamba",
    "jamba",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "mamba",
    "mamba2",
    "minimax",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "recurrent_gemma",
    "rwkv",
    "xlstm",
    "zamba",
    "zamba2",
)
"""model types with layers that hand a state, or a convolution, on from token to token of a row"""
RECURRENT_LAYERS = ("conv", "linear_attention", "mamba", "recurrent")
"""kinds of such layers, as config.json names them"""
WITHOUT_MASK = ("openai-gpt", "xlm")
"""model types that take no mask of queries by keys, or not in all of their layers"""
ALIBI = ("bloom", "mpt")
"""model types that build their bias of distances (ALiBi) from a mask of whole rows"""


BY_CLASS = {"falcon": ("flash2",)}
"""model types that have a class of layers for some backends, and ask for no functions: of a pack
they take the positions alone, which tell its documents apart where it is the only row"""


@dataclass(kw_only=True, slots=True)
class AttentionConfig:
    backend: str = "auto"
    """auto: the fastest for this device, precision and model; eager: the slow reference"""


def attention_implementation(backend: str) -> str:
    """Name of `backend` in transformers; registers ours there."""
    from transformers import AttentionInterface, AttentionMaskInterface

    if backend == "sdpa":
        from app.model.attention.attend import attend_by_document

        AttentionInterface.register(BY_DOCUMENT, attend_by_document)
        AttentionMaskInterface.register(BY_DOCUMENT, build_mask_rule)
    elif backend == "varlen":
        from app.model.attention.varlen import VarlenKernel, attend_by_boundaries

        attend = partial(attend_by_boundaries, kernel=VarlenKernel.installed())
        AttentionInterface.register(BY_BOUNDARIES, attend)
        AttentionMaskInterface.register(BY_BOUNDARIES, build_mask_rule)
    elif backend == "flex":
        from app.model.attention.flex import attend_by_blocks

        # No mask function on purpose: the blocks that a batch comes with are its whole mask.
        AttentionInterface.register(BY_BLOCKS, attend_by_blocks)
    return IN_TRANSFORMERS[backend]


def check_implementation(model: PreTrainedModel, implementation: str) -> None:
    """Raise ValueError where a part of `model` runs another attention than `implementation`.

    transformers replaces what a model does not list, or what is not installed, by what it finds.
    """
    from transformers import PreTrainedModel

    for part in model.modules():
        if not isinstance(part, PreTrainedModel):
            continue
        given = part.config._attn_implementation
        if given != implementation:
            raise UserError(
                f"{type(part).__name__} was to run {implementation}, but transformers gave it "
                f"{given}: type attention=sdpa or attention=eager"
            )


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
    if model_type in RECURRENT or _has_recurrent_layers(numbers):
        return (
            f"{model_type} models have layers that hand a state on from token to token, which "
            "would go from one document of a pack into the next: type packing=none"
        )
    if model_type in WITHOUT_MASK:
        return (
            f"{model_type} models take no mask that keeps the documents of a pack apart: "
            "type packing=none"
        )
    return None


def _has_recurrent_layers(numbers: Mapping[str, Any]) -> bool:
    text = numbers.get("text_config")
    text = text if isinstance(text, Mapping) else numbers
    named = (text.get(key) for key in ("layer_types", "layers_block_type"))
    kinds = [kind for value in named if isinstance(value, list) for kind in value]
    return any(kind in kinds for kind in RECURRENT_LAYERS)


@contextmanager
def generation_attention(model: torch.nn.Module) -> Iterator[None]:
    """Let `model.generate` use transformers' own attention, which knows caches and left padding."""
    from transformers import PreTrainedModel

    # Encoder and decoder have a config each.
    changed = [
        (module, module.config._attn_implementation)
        for module in model.modules()
        if isinstance(module, PreTrainedModel)
        and module.config._attn_implementation in (BY_DOCUMENT, BY_BOUNDARIES, BY_BLOCKS)
    ]
    for module, _ in changed:
        module.set_attn_implementation("sdpa" if module._supports_sdpa else "eager")
    try:
        yield
    finally:
        for module, implementation in changed:
            module.set_attn_implementation(implementation)


@contextmanager
def running(model: torch.nn.Module, backend: str) -> Iterator[None]:
    """Let a model run the attention of `backend`."""
    from transformers import PreTrainedModel

    name = attention_implementation(backend)
    parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    changed = [
        (part, part.config._attn_implementation)
        for part in parts
        if part.config._attn_implementation != name
    ]
    for part, _ in changed:
        part.set_attn_implementation(name)
    try:
        yield
    finally:
        for part, implementation in changed:
            part.set_attn_implementation(implementation)
