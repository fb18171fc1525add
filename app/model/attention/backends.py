"""The attention backends, their names in transformers, and the models that they cannot run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from common.errors import UserError
from common.facts import setting

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

GPU_ONLY = ("flash2", "flash3", "varlen", "flex")
"""backends that can train only on an NVIDIA GPU"""
HALF_PRECISION_ONLY = ("flash2", "flash3", "varlen")
"""backends that compute in half precision only"""
MAX_FLASH_HEAD_DIM = 256
"""largest head dimension of FlashAttention"""
BACKEND_PACKAGES = {
    "flash2": ("flash_attn", "flash-attn"),
    "flash3": ("flash_attn_interface", "flash-attn-3"),
}
"""backend in a separate package -> the module to import, and the package's name"""
_BY_DOCUMENT = "attention_by_document"
_BY_BOUNDARIES = "varlen_by_boundaries"
_BY_BLOCKS = "flex_attention_by_blocks"
"""names under which our attention functions are registered in transformers; with "sdpa" in one, it
refuses models without an sdpa of its own"""
SINKS_ERROR = "attention sinks are computed on a CPU only, and without dropout"
EXCHANGED = ("sdpa", "varlen")
"""backends that can run on a share of the heads, for rows split over ranks"""
IN_TRANSFORMERS = {
    "eager": "eager",
    "sdpa": _BY_DOCUMENT,
    "varlen": _BY_BOUNDARIES,
    "flex": _BY_BLOCKS,
    "flash2": "flash_attention_2",
    "flash3": "flash_attention_3",
}

# Properties of model types that config.json does not contain (transformers 5.23). The lists give an
# early message; the probes at the start of training refuse the models that are missing here.
_COUNTS_POSITIONS = (
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
"""model types that compute positions themselves, counted from the start of the row"""
_WITHOUT_MASK = ("deepseek_v4", "openai-gpt", "xlm")
"""model types that ignore a mask of queries by keys, at least in some layers"""
_ALIBI = ("bloom", "mpt")
"""model types that compute their ALiBi bias from the mask of a whole row"""
_SEES_PADDING = ("encoder-decoder", "prophetnet")
"""model types that see padding whatever the mask is"""
_HASHES_ROWS = ("reformer",)
"""model types that attend inside buckets, into which they sort the tokens of a whole row"""
_SHARED_EXPERTS = ("nllb-moe",)
"""model types whose experts drop tokens above a capacity shared by the whole batch"""
SELECTED_TOKENS = ("index_topk", "keep_window_size", "indexer_budget")
"""names in config.json of the number of keys that each query selects by score"""
_COMPRESSED_TOKENS = {"deepseek_v4": 4}
"""model type -> number of tokens that each selected key represents, if more than one"""
BY_CLASS = {"falcon": ("flash2",)}
"""model types with one attention class per backend, and the backends to use with them: these get
only positions, which keep packed documents apart if the batch is a single row"""


@dataclass(kw_only=True, slots=True)
class AttentionConfig:
    backend: str = setting(
        "auto", choices=("auto", "flash2", "flash3", "varlen", "flex", "sdpa", "eager")
    )
    """auto: the fastest for this device, precision and model; eager: the slow reference"""


def attention_implementation(backend: str) -> str:
    """Register our attention functions in transformers, and return the name of `backend` there."""
    from transformers import AttentionInterface, AttentionMaskInterface

    if backend == "sdpa":
        from app.model.attention.attend import attend_by_document, build_mask_rule
        from app.model.attention.exchange import exchanging

        AttentionInterface.register(_BY_DOCUMENT, exchanging(attend_by_document))
        AttentionMaskInterface.register(_BY_DOCUMENT, build_mask_rule)
    elif backend == "varlen":
        from app.model.attention.attend import build_mask_rule
        from app.model.attention.exchange import exchanging
        from app.model.attention.varlen import VarlenKernel, attend_by_boundaries

        attend = partial(attend_by_boundaries, kernel=VarlenKernel.installed())
        AttentionInterface.register(_BY_BOUNDARIES, exchanging(attend))
        AttentionMaskInterface.register(_BY_BOUNDARIES, build_mask_rule)
    elif backend == "flex":
        from app.model.attention.flex import attend_by_blocks

        # No mask function: the block mask that is built for each batch is complete.
        AttentionInterface.register(_BY_BLOCKS, attend_by_blocks)
    return IN_TRANSFORMERS[backend]


def key_repeats(heads: int, key_heads: int, size: int) -> int:
    """Return how often each key head is repeated so that `size` ranks get equally many of them.

    Where they do not divide `heads`, as the mean of unlike layers in a plan, nearly once a head.
    """
    most = heads // key_heads
    return next(
        (
            times
            for times in range(1, most + 1)
            if key_heads * times % size == 0 and heads % (key_heads * times) == 0
        ),
        most,
    )


def gather_reason(heads: int, key_heads: int, size: int) -> str | None:
    """Return why `size` ranks gather keys and values; None if they exchange heads for tokens.

    Exchanged heads run the fastest kernel, so gathering must send less than half as much.
    """
    if heads % size:
        return f"{size} ranks cannot share {heads} attention heads equally"
    repeats = key_repeats(heads, key_heads, size)
    exchanged, gathered = heads + repeats * key_heads, size * key_heads
    if repeats == 1 or exchanged <= 2 * gathered:
        return None
    return (
        f"{size} ranks have too few key heads ({key_heads}) to share: {gathered} heads to send "
        f"instead of {exchanged}"
    )


def check_implementation(model: PreTrainedModel, implementation: str) -> None:
    """Raise UserError if a part of `model` runs another attention than `implementation`.

    transformers silently replaces an attention that a model does not support.
    """
    from transformers import PreTrainedModel

    for part in model.modules():
        if not isinstance(part, PreTrainedModel):
            continue
        actual = part.config._attn_implementation
        if actual != implementation:
            raise UserError(
                f"{type(part).__name__} should run {implementation}, but transformers replaced it "
                f"by {actual}: type attention=sdpa or attention=eager"
            )


def packing_error(config: Mapping[str, Any], backend: str = "auto") -> str | None:
    """Return why documents cannot be packed for a model, or None; they go into padded rows instead.

    `config`: contents of its config.json.
    """
    model_type = config.get("model_type")
    if model_type in _COUNTS_POSITIONS:
        reason = (
            "compute positions from the start of the row, which are wrong for every document of a "
            "pack but the first"
        )
    elif model_type in _ALIBI or (model_type == "falcon" and config.get("alibi")):
        reason = (
            "compute their ALiBi bias over the whole row, and support no mask that separates the "
            "documents of a pack"
        )
    elif model_type in _WITHOUT_MASK:
        reason = "support no mask that separates the documents of a pack"
    elif config.get("is_encoder_decoder") and backend == "eager":
        reason = (
            "have an encoder, and attention=eager gives it and cross-attention one mask, which "
            "cannot keep the documents of a pack apart"
        )
    else:
        return None
    return f"{model_type} models {reason}"


def batching_error(config: Mapping[str, Any], longest: int | None = None) -> str | None:
    """Return why a document's logits depend on the rest of its batch, or None if they do not.

    Holds for packed and for padded batches of documents up to `longest` tokens. `config`: contents
    of config.json.
    """
    model_type = config.get("model_type")
    if model_type in _SEES_PADDING:
        reason = "let documents see the padding after them, and each other in a pack"
    elif model_type in _HASHES_ROWS:
        reason = (
            "sort the tokens of a whole row into buckets, so that the logits of a document depend "
            "on its padding and its neighbours"
        )
    elif model_type in _SHARED_EXPERTS:
        reason = (
            "drop tokens beyond an expert_capacity that all documents of a batch share, so that "
            "the logits of one depend on the others"
        )
    elif model_type == "t5gemma" and _starts_with_padding(config):
        reason = (
            "mask tokens whose id is pad_token_id, and this decoder starts with one "
            "(decoder_start_token_id): its logits depend on the padding of the row"
        )
    else:
        return _length_error(config, longest)
    return f"{model_type} models {reason}: type model.path=ANOTHER_BASE"


def _length_error(config: Mapping[str, Any], longest: int | None) -> str | None:
    """Return why documents up to `longest` tokens are too long for a model that selects keys."""
    text = _nested_config(config, "text_config")
    model_type = str(text.get("model_type"))
    keys = next((text[name] for name in SELECTED_TOKENS if text.get(name)), None)
    if longest is None or keys is None:
        return None
    selected = keys * _COMPRESSED_TOKENS.get(model_type, 1)
    if longest <= selected:
        return None
    return (
        f"{model_type} models let each token attend to the {keys:,} keys of the highest scores, "
        "and the choice between equal scores depends on the rest of the row: "
        f"type data.sequence_len={selected}"
    )


def _starts_with_padding(config: Mapping[str, Any]) -> bool:
    start = config.get("decoder_start_token_id")
    return start is not None and start == _nested_config(config, "decoder").get("pad_token_id")


def _nested_config(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a nested config of a composite model, or `config` itself if it has none."""
    nested = config.get(name)
    return nested if isinstance(nested, Mapping) else config


def generation_attention(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Use transformers' own attention in `model.generate`, which needs a cache and left padding."""
    ours = (_BY_DOCUMENT, _BY_BOUNDARIES, _BY_BLOCKS)

    def choose(part: PreTrainedModel) -> str:
        own: str = part.config._attn_implementation
        return own if own not in ours else "sdpa" if part._supports_sdpa else "eager"

    return _implementations(model, choose)


def use_backend(model: torch.nn.Module, backend: str) -> AbstractContextManager[None]:
    """Run `model` with the attention of `backend` in this context."""
    name = attention_implementation(backend)
    return _implementations(model, lambda part: name)


@contextmanager
def _implementations(
    model: torch.nn.Module, choose: Callable[[PreTrainedModel], str]
) -> Iterator[None]:
    """Switch the attention of all parts of a model in this context, as transformers names them."""
    from transformers import PreTrainedModel

    # Encoder and decoder have separate configs.
    parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    changed = [
        (part, part.config._attn_implementation, name)
        for part in parts
        if (name := choose(part)) != part.config._attn_implementation
    ]
    for part, _, name in changed:
        part.set_attn_implementation(name)
    try:
        yield
    finally:
        for part, own, _ in changed:
            part.set_attn_implementation(own)
