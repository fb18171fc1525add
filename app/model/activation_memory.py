"""Estimate the activation memory of a training step on a GPU: bytes per token and layer.

Covers layers of attention and a feed-forward network, and counts what autograd saves for the
backward pass. The structure of a layer is described in `app.model.layer_kind`, which also lists the
architectures whose estimates were verified. Needs no torch and no weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.model.layer_kind import Widths

FP32, HALF = 4, 2
"""bytes per value"""
LOGITS_PER_CHUNK = 2**25
"""logits in memory at once: 128 MiB in fp32, enough for products at full speed"""
CPU_LOGITS, CPU_ROWS = 2**21, 256
"""logits per chunk that fit in a CPU's cache, and the smallest chunk with fast matrix products"""
GPU_ROWS = 1024
"""smallest chunk on a GPU, in positions: with fewer, reading the weight dominates the time"""
GPU_TILE = 128
"""rows of a matrix product's tile on a GPU"""
LOSS_BYTES = 6
"""bytes per logit of a chunk with PyTorch's operators: one copy in half precision, one in fp32"""
FUSED_CHUNKS, TRAINED_CHUNKS = 2, 4
"""factors on the chunk length: with the fused loss kernel, which needs no fp32 logits; and with a
trainable head, whose whole gradient is updated once per chunk"""
MAX_FLASH_HEAD_DIM = 256
"""largest head dimension of FlashAttention"""
HALF_SCORES = ("gpt_oss",)
"""model types whose eager attention saves its probabilities in half precision only"""
CLAMPED_GATES = ("gpt_oss",)
"""model types that clamp the gate by separate operators, which save seven tensors in all; this
cannot be seen in their modules"""
POST_NORMS = ("bart",)
"""encoder-decoder model types with norms after each residual sum; their attention has no position
bias, but their logits have a bias, which requires the full logits"""
JOINS_ROTATED = ("gpt_neox", "persimmon", "phi", "stablelm")
"""model types with partial rotary embeddings that concatenate the rotated part of each head with
the rest: the attention output is then copied back to token order"""
GELU_OPERATORS = ("gelu_new",)
"""ungated activations made of separate operators, three of which save fp32 tensors"""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerExecution:
    """How a model's layers are computed, as far as it affects their activation memory."""

    tokens: int
    """tokens of a micro-batch on one device"""
    value_bytes: int = HALF
    """bytes per value of the inputs and outputs of matrix products"""
    residual_bytes: int = HALF
    """bytes per value of the residual stream"""
    fuses_norm_and_gate: bool = False
    """whether fused kernels compute the RMS norms and gates"""
    trains_base: bool = False
    """whether the base's own weights are trained"""
    drops_inputs: bool = False
    """whether each adapter applies its own dropout to its input"""
    input_copies: int = 0
    """copies of each matrix's input that its adapter saves instead of sharing one between matrices,
    as autocast's copy of an fp32 input"""
    output_copies: int = 0
    """copies of each matrix's output that its adapter saves: DoRA scales those of base and LoRA"""
    keeps_scores: bool = False
    """whether attention is not one fused kernel and saves the scores [heads, tokens, tokens] of
    each sequence"""
    sequence_len: int = 0
    """tokens of a packed sequence"""
    groups_documents: bool = False
    """whether queries, keys, values and output of attention are copied for each document"""
    repeats_heads: bool = False
    """whether keys and values are repeated for each query head before attention"""
    rank_sum: float = 0.0
    """sum of the ranks of a layer's adapters: each saves the output of its first matrix"""
    scaled_inputs: float = 0.0
    """features of a layer that IA3 scales before they enter a matrix"""
    scaled_outputs: float = 0.0
    """features of a layer that IA3 scales after they leave a matrix"""
    adapter_value_bytes: int = FP32
    """bytes per value of the trainable parameters"""
    merges_experts: bool = False
    """whether each pass adds LoRA's product to the matrices of all experts, and saves the sums"""

    def fuses_gate(self, widths: Widths) -> bool:
        """Return whether one kernel computes the gate; none does for experts."""
        has_kernel = widths.kind.has_gate and widths.kind.activation in ("silu", "swish")
        return self.fuses_norm_and_gate and has_kernel and not widths.routed_copies

    def norm_bytes(self) -> int:
        """Return the bytes per feature that a norm saves: its input, or a copy in fp32."""
        return self.residual_bytes if self.fuses_norm_and_gate else FP32


def layer_bytes(widths: Widths, execution: LayerExecution, mode: str) -> float:
    """Return the bytes per token that one layer saves for its backward pass.

    `mode`: the recompute mode.
    """
    hidden, value_bytes = widths.hidden, execution.value_bytes
    if mode == "offload":
        return 0
    if mode == "full":
        return execution.residual_bytes * hidden
    if mode == "selective":
        # Products that are not wider than their input, and attention if it is one operator.
        keeps_queries = (widths.query <= hidden) + (not execution.keeps_scores)
        narrow = keeps_queries * widths.query + 2 * widths.key_value + 2 * hidden
        return execution.residual_bytes * hidden + value_bytes * narrow
    # The norms and their outputs, the tensors of attention, and those of the feed-forward.
    norm = execution.norm_bytes()
    if execution.trains_base and not execution.fuses_norm_and_gate:
        norm += execution.residual_bytes
    kind = widths.kind
    num_bytes = (kind.num_norms * norm + 2.0 * value_bytes) * hidden
    num_bytes += feed_forward_bytes(widths, execution)
    num_bytes += 2 * hidden * widths.has_dropout + FP32 * hidden * kind.norms_routed
    num_bytes += _attention_bytes(widths, execution)
    if widths.routed_copies:  # each expert has its own copy of the second norm's output
        num_bytes -= value_bytes * hidden
    if execution.merges_experts:
        num_bytes += 3 * value_bytes * hidden * widths.routed_features / execution.tokens
    return num_bytes + _adapter_bytes(widths, execution)


def _attention_bytes(widths: Widths, execution: LayerExecution) -> float:
    """Return the bytes per token that attention saves: queries, keys, values, output, scores."""
    kind, value_bytes, heads = widths.kind, execution.value_bytes, widths.query + widths.key_value
    shared = 2 * value_bytes * (widths.query - widths.key_value)
    num_bytes = float(value_bytes * (2 * heads + widths.latent))
    head_norm = FP32 if kind.has_plain_head_norms else execution.norm_bytes()
    if execution.trains_base and not execution.fuses_norm_and_gate:
        head_norm += execution.residual_bytes
    num_bytes += head_norm * heads * widths.norms_heads
    if kind.norms_values:  # Gemma 4's norm has no weights, and no kernel replaces it
        num_bytes += FP32 * widths.key_value
    if execution.repeats_heads:
        num_bytes += shared
    if execution.groups_documents:
        num_bytes += value_bytes * widths.query
    elif execution.keeps_scores:
        scores = score_bytes(widths, execution) * widths.heads * execution.sequence_len
        num_bytes += scores + shared
    elif kind.joins_heads:
        num_bytes += value_bytes * heads
    elif widths.model_type in JOINS_ROTATED:
        num_bytes += value_bytes * widths.query
    return num_bytes


def feed_forward_bytes(widths: Widths, execution: LayerExecution) -> float:
    """Return the bytes per token that a feed-forward saves, including the inputs of experts."""
    kind, value_bytes = widths.kind, execution.value_bytes
    if not kind.is_gated:
        operators = 3 * FP32 if kind.activation in GELU_OPERATORS else 0
        return float((2 * value_bytes + operators) * widths.feed_forward)
    of_gate = 7 if widths.model_type in CLAMPED_GATES else 3 if execution.fuses_gate(widths) else 4
    features = of_gate * widths.feed_forward + widths.routed_copies * widths.hidden
    return float(value_bytes * features)


def score_bytes(widths: Widths, execution: LayerExecution) -> int:
    """Return the bytes that unfused attention saves per score.

    These are the probability, in fp32 and in the dtype of the values, and the output of a softcap.
    """
    value_bytes = execution.value_bytes
    probability = value_bytes if widths.model_type in HALF_SCORES else FP32 + value_bytes
    return probability + value_bytes * widths.caps_scores


def encoder_decoder_layer_bytes(widths: Widths, execution: LayerExecution) -> float:
    """Return the bytes per token of an encoder-decoder's layer, averaged over both stacks."""
    if widths.model_type in POST_NORMS:
        return _bart_layer_bytes(widths, execution)
    return _t5_layer_bytes(widths, execution)


def _bart_layer_bytes(widths: Widths, execution: LayerExecution) -> float:
    """Return the bytes per token of a BART layer.

    Norms save an fp32 copy of their input and each dropout saves a mask. Every decoder layer casts
    the encoder's output for its cross-attention.
    """
    value_bytes = execution.value_bytes
    norm = (FP32 + value_bytes + 1) * widths.hidden
    attention = norm + value_bytes * 2 * (widths.query + widths.key_value)
    cross_attention = attention + value_bytes * widths.hidden
    feed_forward = norm + feed_forward_bytes(widths, execution)
    both = 2 * attention + cross_attention + 2 * feed_forward
    return both / 2 + value_bytes * execution.rank_sum


def _t5_layer_bytes(widths: Widths, execution: LayerExecution) -> float:
    """Return the bytes per token of a T5 layer.

    Norms save their input and an fp32 copy of it. The GELU is five operators, four of which save
    fp32 tensors. Each dropout saves a mask. A decoder layer has a causal copy of the position bias.
    """
    hidden, value_bytes = widths.hidden, execution.value_bytes
    norm = (FP32 + execution.residual_bytes + value_bytes) * hidden
    attention = norm + value_bytes * 2 * (widths.query + widths.key_value) + hidden
    feed_forward = norm + hidden + (4 * FP32 + 3 * value_bytes + 1) * widths.feed_forward
    causal_bias = bias_bytes(widths, execution) / (execution.tokens / 2)
    both = (attention + feed_forward) + (2 * attention + feed_forward + causal_bias)
    return both / 2 + value_bytes * execution.rank_sum


def _adapter_bytes(widths: Widths, execution: LayerExecution) -> float:
    """Return the bytes per token that adapters save in addition to the layer.

    May be negative: frozen matrices do not save the inputs that the layer counts.
    """
    value_bytes = execution.value_bytes
    shared = value_bytes * (2 * widths.hidden + widths.feed_forward)
    if execution.scaled_inputs or execution.scaled_outputs:
        inputs = execution.adapter_value_bytes * execution.scaled_inputs
        return inputs + value_bytes * execution.scaled_outputs - shared
    num_bytes = value_bytes * (execution.output_copies * widths.outputs + execution.rank_sum)
    if copies := max(execution.input_copies, int(execution.drops_inputs)):
        # A dropout also saves a mask of one byte per feature.
        num_bytes += (value_bytes * copies + execution.drops_inputs) * widths.inputs - shared
    return num_bytes


def bias_bytes(widths: Widths, execution: LayerExecution) -> float:
    """Return the bytes of T5's position bias, which all sequences share."""
    if widths.model_type in POST_NORMS:
        return 0.0
    return float(execution.value_bytes * widths.heads * execution.sequence_len**2)


def rows_per_chunk(vocabulary: int, device: str) -> int:
    """Return the number of positions whose logits are in memory at the same time."""
    rows = max(1, LOGITS_PER_CHUNK // vocabulary)
    if device == "cpu":
        from app.model.cpu.fp32 import ROWS

        rows = min(rows, max(CPU_LOGITS // vocabulary, CPU_ROWS))
        return rows - rows % ROWS or rows
    rows = max(rows, GPU_ROWS)
    return rows - rows % GPU_TILE
