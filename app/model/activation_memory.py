"""What the activations of a training step take on a GPU, by arithmetic: bytes a token and layer.

Of decoder layers with attention and a gated feed-forward, as autograd keeps them; other layers keep
less, or are counted with room to spare. Needs no torch and no weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

FP32, HALF = 4, 2
"""bytes of a number"""
LOGITS_PER_CHUNK = 2**25
"""logits in memory at once: 128 MiB in fp32, enough for products at full speed"""
CPU_LOGITS, CPU_ROWS = 2**21, 256
"""logits of a chunk that stay in a CPU's cache, and its least rows for fast products"""
GPU_ROWS = 1024
"""least positions of a chunk on a GPU: with fewer, reading the weight dominates"""
GPU_TILE = 128
"""rows of a tile of a GPU's products"""
LOSS_BYTES = 12
"""of each logit of a chunk: half precision, fp32, and their temporary copies"""

NORMS_HEADS = ("qwen3", "qwen3_moe", "gemma3_text", "olmo2", "olmo3")
"""model types that normalize queries and keys"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Widths:
    """The numbers of a model's layers that its activations follow from."""

    layers: int
    hidden: int
    query: int
    key_value: int
    feed_forward: int
    """of all experts that a token goes to"""
    heads: int
    vocabulary: int
    routed_copies: int = 0
    """times a token's input is copied for experts"""
    norms_heads: bool = False
    """whether queries and keys are normalized"""

    @property
    def inputs(self) -> int:
        """Features read by the matrices of a layer."""
        return 5 * self.hidden + self.query + self.feed_forward

    @property
    def outputs(self) -> int:
        """Features written by the matrices of a layer."""
        return self.query + 2 * self.key_value + 2 * self.hidden + 2 * self.feed_forward

    @property
    def matrices(self) -> int:
        """Weights of a layer's matrices, those of the experts not counted."""
        attention = 2 * self.query + 2 * self.key_value
        return self.hidden * (attention + 3 * self.feed_forward)


def widths_of(architecture: Any) -> Widths | None:
    """Return the widths of a transformers config; None where it does not say them."""
    text = architecture.get_text_config()

    def find(*names: str) -> int:
        found = (_number(text, name) for name in names)
        return next((int(number) for number in found if isinstance(number, (int, float))), 0)

    hidden, layers = find("hidden_size"), find("num_hidden_layers")
    heads = find("num_attention_heads")
    if not (hidden and layers and heads):
        return None
    head_dim = find("head_dim") or hidden // heads
    experts = find("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
    names = ("intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "ffn_hidden_size")
    width = find(*names, "n_inner")  # where GPT-2 leaves its own empty, four times the hidden ones
    dense = width or 4 * hidden
    routed = experts * (find("moe_intermediate_size") or dense)
    return Widths(
        layers=layers + (find("num_decoder_layers", "decoder_layers") if _is_pair(text) else 0),
        hidden=hidden,
        query=heads * head_dim,
        key_value=(find("num_key_value_heads") or heads) * head_dim,
        feed_forward=routed + find("shared_expert_intermediate_size") if experts else dense,
        heads=heads,
        vocabulary=find("vocab_size"),
        routed_copies=2 * experts,
        norms_heads=text.model_type in NORMS_HEADS,
    )


def _number(config: Any, name: str) -> Any:
    """Return a number of a config; the mean of its layers' where each has its own (Gemma 4)."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers refuses to read such a number of the whole config
        numbers = [getattr(layer, name) for layer in config.per_layer_config]
        return sum(numbers) / len(numbers)


def _is_pair(config: Any) -> bool:
    return bool(config.is_encoder_decoder)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """How a model's layers are computed, as far as it changes what they keep."""

    tokens: int
    """of a micro-batch on one device"""
    width: int = HALF
    """bytes of what matrices read and write"""
    residual: int = HALF
    """bytes of the stream between layers"""
    fuses_norm_and_gate: bool = False
    trains_base: bool = False
    drops: bool = False
    """whether each adapter reads its own dropped input"""
    fuses_adapters: bool = True
    keeps_scores: bool = False
    """whether attention is not one kernel: scores [heads, tokens, tokens]"""
    ranks: float = 0.0
    """of a layer's adapters together: each keeps what its first matrix returns"""


def bytes_of_layer(widths: Widths, kept: Kept, mode: str) -> float:
    """Return the bytes a token that one layer keeps from its forward to its backward pass."""
    hidden, inner, width = widths.hidden, widths.feed_forward, kept.width
    if mode == "offload":
        return 0
    if mode == "full":
        return kept.residual * hidden
    if mode == "selective":
        narrow = 2 * widths.query + 2 * widths.key_value + 2 * hidden
        return kept.residual * hidden + width * narrow
    # Two norms and what they return, attention's four tensors, the gate's three.
    norm = kept.residual if kept.fuses_norm_and_gate else FP32
    if kept.trains_base and not kept.fuses_norm_and_gate:
        norm += kept.residual
    of_layer = 2 * (norm + width) * hidden + width * widths.routed_copies * hidden
    of_layer += width * 2 * (widths.query + widths.key_value)
    of_layer += norm * (widths.query + widths.key_value) * widths.norms_heads
    of_layer += width * inner * (3 if kept.fuses_norm_and_gate else 4)
    if kept.drops:  # a dropped copy and its mask, instead of the inputs that were shared
        of_layer += (width + 1) * widths.inputs - width * (2 * hidden + inner)
    if not kept.fuses_adapters:
        of_layer += 3 * width * widths.outputs + FP32 * widths.inputs
    if kept.keeps_scores:
        of_layer += (FP32 + width) * widths.heads * kept.tokens
    return of_layer + width * kept.ranks


def rows_per_chunk(vocabulary: int, device: str) -> int:
    """Return the number of positions whose logits are in memory at once."""
    rows = max(1, LOGITS_PER_CHUNK // vocabulary)
    if device == "cpu":
        from app.model.cpu.fp32 import ROWS

        rows = min(rows, max(CPU_LOGITS // vocabulary, CPU_ROWS))
        return rows - rows % ROWS or rows
    rows = max(rows, GPU_ROWS)
    return rows - rows % GPU_TILE
