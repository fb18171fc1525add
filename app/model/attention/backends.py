"""The attention that a person can choose, and its name in transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from app.process.errors import UserError
from data_modules import setting

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

GPU_ONLY = ("flash2", "flash3", "varlen", "flex")
"""backends that need an NVIDIA GPU to train"""
HALF_PRECISION_ONLY = ("flash2", "flash3", "varlen")
"""backends that compute in half precision only"""
BACKEND_PACKAGES = {
    "flash2": ("flash_attn", "flash-attn"),
    "flash3": ("flash_attn_interface", "flash-attn-3"),
}
"""backends of separate packages: the module to import, and the package's name"""
BY_DOCUMENT = "sdpa_by_document"
BY_BOUNDARIES = "varlen_by_boundaries"
BY_BLOCKS = "flex_attention_by_blocks"
"""names under which our attention functions are registered in transformers"""
IN_TRANSFORMERS = {
    "eager": "eager",
    "sdpa": BY_DOCUMENT,
    "varlen": BY_BOUNDARIES,
    "flex": BY_BLOCKS,
    "flash2": "flash_attention_2",
    "flash3": "flash_attention_3",
}

# Model types by what config.json does not tell (transformers 5.23). The lists give an early
# message, the probes at the start of training refuse what they lack.
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
"""model types that compute positions themselves, from the start of the row"""
WITHOUT_MASK = ("deepseek_v4", "openai-gpt", "xlm")
"""model types that take no mask of queries by keys, or not in all layers"""
ALIBI = ("bloom", "mpt")
"""model types that compute their ALiBi bias from the mask of a whole row"""
SEES_PADDING = ("encoder-decoder", "prophetnet")
"""model types of which no mask hides all padding"""
HASHES_ROWS = ("reformer",)
"""model types whose queries see the keys of their bucket, and buckets hold tokens of a whole row"""
SHARED_EXPERTS = ("nllb-moe",)
"""model types whose experts drop tokens beyond a capacity that the whole batch shares"""
SELECTED_TOKENS = ("index_topk", "keep_window_size", "indexer_budget")
"""names in config.json of how many keys each query selects by score"""
COMPRESSED_TOKENS = {"deepseek_v4": 4}
"""by model type, how many tokens each selected key stands for, where it is more than one"""
BY_CLASS = {"falcon": ("flash2",)}
"""model types with an attention class per backend: they take positions only, which separate the
documents of a pack where it is the only row of its batch"""


@dataclass(kw_only=True, slots=True)
class AttentionConfig:
    backend: str = setting(
        "auto", choices=("auto", "flash2", "flash3", "varlen", "flex", "sdpa", "eager")
    )
    """auto: the fastest for this device, precision and model; eager: the slow reference"""


def attention_implementation(backend: str) -> str:
    """Name of `backend` in transformers; registers ours there."""
    from transformers import AttentionInterface, AttentionMaskInterface

    if backend == "sdpa":
        from app.model.attention.attend import attend_by_document, build_mask_rule

        AttentionInterface.register(BY_DOCUMENT, attend_by_document)
        AttentionMaskInterface.register(BY_DOCUMENT, build_mask_rule)
    elif backend == "varlen":
        from app.model.attention.attend import build_mask_rule
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
    """Raise UserError where a part of `model` runs another attention than `implementation`.

    transformers silently replaces an attention that a model does not support.
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


def why_not_packed(numbers: Mapping[str, Any], backend: str = "auto") -> str | None:
    """Return why a model with these config.json `numbers` cannot be packed, None where it can.

    Its documents then stand in padded rows.
    """
    model_type = numbers.get("model_type")
    if model_type in COUNTS_POSITIONS:
        reason = (
            "compute positions from the start of the row, which are wrong for every document of a "
            "pack but the first"
        )
    elif model_type in ALIBI or (model_type == "falcon" and numbers.get("alibi")):
        reason = (
            "compute their ALiBi bias over the whole row, and take no mask that separates the "
            "documents of a pack"
        )
    elif model_type in WITHOUT_MASK:
        reason = "take no mask that separates the documents of a pack"
    elif numbers.get("is_encoder_decoder") and backend == "eager":
        reason = (
            "have an encoder, and attention=eager gives it and cross-attention one mask, which "
            "cannot keep the documents of a pack apart"
        )
    else:
        return None
    return f"{model_type} models {reason}"


def why_not_batched(numbers: Mapping[str, Any], longest: int | None = None) -> str | None:
    """Return why a document's logits depend on what else is in its batch, None where they do not.

    For packed and padded batches alike, of documents up to `longest` tokens.
    """
    model_type = numbers.get("model_type")
    if model_type in SEES_PADDING:
        reason = "let documents see the padding after them, and each other in a pack"
    elif model_type in HASHES_ROWS:
        reason = (
            "sort the tokens of a whole row into buckets, so that the logits of a document depend "
            "on its padding and its neighbours"
        )
    elif model_type in SHARED_EXPERTS:
        reason = (
            "drop tokens beyond an expert_capacity that all documents of a batch share, so that "
            "the logits of one depend on the others"
        )
    elif model_type == "t5gemma" and _starts_with_padding(numbers):
        reason = (
            "mask tokens whose id is pad_token_id, and this decoder starts with one "
            "(decoder_start_token_id): its logits depend on the padding of the row"
        )
    else:
        return _why_too_long(numbers, longest)
    return f"{model_type} models {reason}: type model.path=ANOTHER_BASE"


def _why_too_long(numbers: Mapping[str, Any], longest: int | None) -> str | None:
    """Return why documents up to `longest` tokens are too long for an indexer."""
    text = _part(numbers, "text_config")
    model_type = str(text.get("model_type"))
    keys = next((text[name] for name in SELECTED_TOKENS if text.get(name)), None)
    if longest is None or keys is None:
        return None
    selected = keys * COMPRESSED_TOKENS.get(model_type, 1)
    if longest <= selected:
        return None
    return (
        f"{model_type} models let each token attend to the {keys:,} keys of the highest scores, "
        "and which of equal scores are taken depends on the rest of the row: "
        f"type data.sequence_len={selected}"
    )


def _starts_with_padding(numbers: Mapping[str, Any]) -> bool:
    start = numbers.get("decoder_start_token_id")
    return start is not None and start == _part(numbers, "decoder").get("pad_token_id")


def _part(numbers: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a nested config of a composite model, or `numbers` where there is none."""
    part = numbers.get(name)
    return part if isinstance(part, Mapping) else numbers


@contextmanager
def generation_attention(model: torch.nn.Module) -> Iterator[None]:
    """Use transformers' own attention in `model.generate`, for its cache and left padding."""
    from transformers import PreTrainedModel

    # Encoder and decoder each have a config.
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
def use_backend(model: torch.nn.Module, backend: str) -> Iterator[None]:
    """Run `model` with the attention of `backend`."""
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
