"""What the activations of a training step take on a GPU, by arithmetic: bytes a token and layer.

Of layers with attention and a feed-forward, as autograd keeps them; what a layer is made of is in
`app.model.layer_kind`, and which of them are a guess. Needs no torch and no weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.model.layer_kind import Widths

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
LOSS_BYTES = 6
"""of each logit of a chunk by PyTorch's operators: half precision, and fp32"""
FUSED_CHUNKS, TRAINED_CHUNKS = 2, 4
"""factors by which chunks are longer: with one kernel, which needs no logits in fp32; and with a
head that trains, to the whole of whose gradient each chunk adds"""
WIDEST_FLASH_HEAD = 256
"""limit of FlashAttention"""
HALF_SCORES = ("gpt_oss",)
"""model types whose eager attention keeps its probabilities in half precision alone"""
CLAMPED_GATES = ("gpt_oss",)
"""model types whose gate is clamped by operators that keep seven tensors in all, which no module
of theirs shows"""
POST_NORMS = ("bart",)
"""model types of pairs that normalize each sum; their attention has no bias of positions, but their
logits have one, for which they are computed whole"""
JOINS_ROTATED = ("gpt_neox", "persimmon", "phi", "stablelm")
"""model types that join what is rotated of a query to the rest, head by head: what attention
returns is copied to the order of tokens"""
GELU_OPERATORS = ("gelu_new",)
"""activations of a feed-forward without a gate that are operators of their own: three keep fp32"""


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
    copies: int = 0
    """of what each matrix reads, that its adapter keeps in place of what they share: autocast's of
    an input in fp32"""
    results: int = 0
    """of what each matrix writes, that its adapter keeps: DoRA scales the base's and LoRA's"""
    keeps_scores: bool = False
    """whether attention is not one kernel: scores [heads, tokens, tokens] of each sequence"""
    sequence_len: int = 0
    groups_documents: bool = False
    """whether each document's queries, keys and values are copied for attention, and its output"""
    repeats_heads: bool = False
    """and keys and values are, for each query's head"""
    ranks: float = 0.0
    """of a layer's adapters together: each keeps what its first matrix returns"""
    scaled_inputs: float = 0.0
    """features of a layer that IA3 scales before a matrix reads them"""
    scaled_outputs: float = 0.0
    """and those that it scales after one"""
    adapter_width: int = FP32
    """bytes of a number of what trains"""
    merges_experts: bool = False
    """whether each pass adds LoRA's product to the matrices of all experts, and keeps the sums"""

    def fuses_gate(self, widths: Widths) -> bool:
        """Return whether the gate's product is one kernel, which that of experts is not."""
        has_kernel = widths.kind.has_gate and widths.kind.activation in ("silu", "swish")
        return self.fuses_norm_and_gate and has_kernel and not widths.routed_copies

    def norm_bytes(self) -> int:
        """Return the bytes of a feature that a norm keeps: its input, or a copy in fp32."""
        return self.residual if self.fuses_norm_and_gate else FP32


def bytes_of_layer(widths: Widths, kept: Kept, mode: str) -> float:
    """Return the bytes a token that one layer keeps from its forward to its backward pass."""
    hidden, width = widths.hidden, kept.width
    if mode == "offload":
        return 0
    if mode == "full":
        return kept.residual * hidden
    if mode == "selective":
        # Products that do not widen, and attention where it is one operator.
        keeps_queries = (widths.query <= hidden) + (not kept.keeps_scores)
        narrow = keeps_queries * widths.query + 2 * widths.key_value + 2 * hidden
        return kept.residual * hidden + width * narrow
    # Two norms and what they return, attention's four tensors, the gate's three.
    norm = kept.norm_bytes()
    if kept.trains_base and not kept.fuses_norm_and_gate:
        norm += kept.residual
    kind = widths.kind
    of_layer = (kind.num_norms * norm + 2.0 * width) * hidden + bytes_of_feed_forward(widths, kept)
    of_layer += 2 * hidden * widths.has_dropout + FP32 * hidden * kind.norms_routed
    of_layer += _kept_by_attention(widths, kept)
    if widths.routed_copies:  # each expert has its own copy of the second norm's
        of_layer -= width * hidden
    if kept.merges_experts:
        of_layer += 3 * width * hidden * widths.routed_features / kept.tokens
    return of_layer + _kept_by_adapters(widths, kept)


def _kept_by_attention(widths: Widths, kept: Kept) -> float:
    """Return the bytes a token of queries, keys, values, what is made of them, and the output."""
    kind, width, heads = widths.kind, kept.width, widths.query + widths.key_value
    shared = 2 * width * (widths.query - widths.key_value)
    kept_bytes = float(width * (2 * heads + widths.latent))
    head_norm = FP32 if kind.has_plain_head_norms else kept.norm_bytes()
    if kept.trains_base and not kept.fuses_norm_and_gate:
        head_norm += kept.residual
    kept_bytes += head_norm * heads * widths.norms_heads
    if kind.norms_values:  # in Gemma 4 by a norm without weights, which no kernel takes
        kept_bytes += FP32 * widths.key_value
    if kept.groups_documents:
        kept_bytes += width * widths.query + shared * kept.repeats_heads
    elif kept.keeps_scores:
        scores = score_bytes(widths, kept) * widths.heads * kept.sequence_len
        kept_bytes += scores + shared
    elif kind.joins_heads:
        kept_bytes += width * heads
    elif widths.model_type in JOINS_ROTATED:
        kept_bytes += width * widths.query
    return kept_bytes


def bytes_of_feed_forward(widths: Widths, kept: Kept) -> float:
    """Return the bytes a token that a layer's gate keeps, and its experts of their inputs."""
    kind, width = widths.kind, kept.width
    if not kind.is_gated:
        operators = 3 * FP32 if kind.activation in GELU_OPERATORS else 0
        return float((2 * width + operators) * widths.feed_forward)
    of_gate = 7 if widths.model_type in CLAMPED_GATES else 3 if kept.fuses_gate(widths) else 4
    features = of_gate * widths.feed_forward + widths.routed_copies * widths.hidden
    return float(width * features)


def score_bytes(widths: Widths, kept: Kept) -> int:
    """Return the bytes that attention in more than one kernel keeps of a score: its probability,
    in fp32 and in the values' dtype, and what a cap's tanh returned.
    """
    probability = kept.width if widths.model_type in HALF_SCORES else FP32 + kept.width
    return probability + kept.width * widths.caps_scores


def bytes_of_pair_layer(widths: Widths, kept: Kept) -> float:
    """Return the bytes a token of its side that a layer of a pair keeps, the mean of both sides."""
    if widths.model_type in POST_NORMS:
        return _bytes_of_bart_layer(widths, kept)
    return _bytes_of_t5_layer(widths, kept)


def _bytes_of_bart_layer(widths: Widths, kept: Kept) -> float:
    """Return the same of a BART: norms keep a copy of their input in fp32, each dropout a mask.

    What attention reads of the encoder is cast in every layer of the decoder.
    """
    of_norm = (FP32 + kept.width + 1) * widths.hidden
    attention = of_norm + kept.width * 2 * (widths.query + widths.key_value)
    cross_attention = attention + kept.width * widths.hidden
    feed_forward = of_norm + bytes_of_feed_forward(widths, kept)
    return (2 * attention + cross_attention + 2 * feed_forward) / 2 + kept.width * kept.ranks


def _bytes_of_t5_layer(widths: Widths, kept: Kept) -> float:
    """Return the same of a T5.

    Its norms keep their input and a copy in fp32; its GELU is five operators, four of which keep
    fp32; each dropout keeps a mask; a decoder's layer has a causal copy of the bias.
    """
    hidden, width = widths.hidden, kept.width
    of_norm = (FP32 + kept.residual + width) * hidden
    attention = of_norm + width * 2 * (widths.query + widths.key_value) + hidden
    feed_forward = of_norm + hidden + (4 * FP32 + 3 * width + 1) * widths.feed_forward
    causal_bias = bias_bytes(widths, kept) / (kept.tokens / 2)
    both = (attention + feed_forward) + (2 * attention + feed_forward + causal_bias)
    return both / 2 + width * kept.ranks


def _kept_by_adapters(widths: Widths, kept: Kept) -> float:
    """Return the bytes a token that adapters keep beside what their layer does, which may be
    less: matrices that do not train need no inputs.
    """
    width = kept.width
    shared = width * (2 * widths.hidden + widths.feed_forward)
    if kept.scaled_inputs or kept.scaled_outputs:
        scaled = kept.adapter_width * kept.scaled_inputs + width * kept.scaled_outputs
        return scaled - shared
    own = max(kept.copies, int(kept.drops))
    copied = (width * own + kept.drops) * widths.inputs - shared if own else 0
    return copied + width * (kept.results * widths.outputs + kept.ranks)


def bias_bytes(widths: Widths, kept: Kept) -> float:
    """Return the bytes of a T5's bias of attention, the same for all sequences."""
    if widths.model_type in POST_NORMS:
        return 0.0
    return float(kept.width * widths.heads * kept.sequence_len**2)


def rows_per_chunk(vocabulary: int, device: str) -> int:
    """Return the number of positions whose logits are in memory at once."""
    rows = max(1, LOGITS_PER_CHUNK // vocabulary)
    if device == "cpu":
        from app.model.cpu.fp32 import ROWS

        rows = min(rows, max(CPU_LOGITS // vocabulary, CPU_ROWS))
        return rows - rows % ROWS or rows
    rows = max(rows, GPU_ROWS)
    return rows - rows % GPU_TILE
