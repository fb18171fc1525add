"""Estimate the activation memory of a step, and the memory of the loss, on a GPU.

Counts what autograd saves for the backward pass in layers of attention and a feed-forward network,
in bytes per token and layer, then the moments of a step. Needs no torch and no weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from app.model.attention import gather_reason, key_repeats
from app.model.recompute import FUSED_CHUNKS, TRAINED_CHUNKS, rows_per_chunk
from app.planning.planned_model import Widths

if TYPE_CHECKING:
    from app.planning.memory import PlannedRun

FP32, HALF = 4, 2
"""bytes per value"""
_BATCH_BYTES = 44
"""bytes of a micro-batch per token: ids, positions, labels and data sets in int64, weights in fp32,
and the trained columns"""
_LOSS_BYTES = 6
"""bytes per logit of a chunk with PyTorch's operators: one copy in half precision, one in fp32"""
_FUSED_ACTIVATIONS = ("silu", "swish", "gelu_pytorch_tanh")
"""activations of gates that one kernel computes"""
_GELU_OPERATORS = ("gelu_new",)
"""ungated activations made of separate operators, three of which save fp32 tensors"""
_NORM_TEMPORARIES = 5
"""fp32 tensors of hidden states that are alive at once in the backward pass of an unfused norm"""
_VECTOR_TEMPORARIES = 3
"""tensors of IA3's scaled features that are alive at once in the backward pass"""
_EXPERT_TEMPORARIES = 3
"""tensors of the experts' outputs that are alive at once in the backward pass of their weighting"""
_SCORE_TEMPORARIES = 2
"""tensors of attention scores, besides the saved probabilities, that are alive at once in the
backward pass of attention that is not one kernel"""
_GELU_TEMPORARIES = 3
"""fp32 tensors of features, besides the saved input, that are alive at once in the backward pass of
a GELU made of several operators"""
_WHOLE_LOGITS = 3
"""fp32 tensors of the logits that are alive at once if the loss is not computed in chunks"""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerExecution:
    """How a model's layers are computed, as far as it affects their activation memory."""

    tokens: int
    """tokens of a micro-batch on one device that have a backward pass"""
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
        has_kernel = widths.kind.has_gate and widths.kind.activation in _FUSED_ACTIVATIONS
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
    num_bytes += _feed_forward_bytes(widths, execution)
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
        # A probability in fp32 and in the dtype of the values, and the output of a softcap.
        score = (FP32 if not widths.family.has_half_scores else 0) + value_bytes
        score += value_bytes * widths.caps_scores
        num_bytes += score * widths.heads * execution.sequence_len + shared
    elif kind.joins_heads:
        num_bytes += value_bytes * heads
    elif widths.family.joins_rotated:
        num_bytes += value_bytes * widths.query
    return num_bytes


def _feed_forward_bytes(widths: Widths, execution: LayerExecution) -> float:
    """Return the bytes per token that a feed-forward saves, including the inputs of experts."""
    kind, value_bytes = widths.kind, execution.value_bytes
    if not kind.is_gated:
        operators = 3 * FP32 if kind.activation in _GELU_OPERATORS else 0
        return float((2 * value_bytes + operators) * widths.feed_forward)
    of_gate = 7 if widths.family.clamps_gate else 3 if execution.fuses_gate(widths) else 4
    features = of_gate * widths.feed_forward + widths.routed_copies * widths.hidden
    return float(value_bytes * features)


def _bart_layer_bytes(widths: Widths, execution: LayerExecution) -> float:
    """Return the bytes per token of a BART layer, averaged over encoder and decoder.

    Norms save an fp32 copy of their input and each dropout saves a mask. Every decoder layer casts
    the encoder's output for its cross-attention.
    """
    value_bytes = execution.value_bytes
    norm = (FP32 + value_bytes + 1) * widths.hidden
    attention = norm + value_bytes * 2 * (widths.query + widths.key_value)
    cross_attention = attention + value_bytes * widths.hidden
    feed_forward = norm + _feed_forward_bytes(widths, execution)
    both = 2 * attention + cross_attention + 2 * feed_forward
    return both / 2 + value_bytes * execution.rank_sum


def _t5_layer_bytes(widths: Widths, execution: LayerExecution) -> float:
    """Return the bytes per token of a T5 layer, averaged over encoder and decoder.

    Norms save their input and an fp32 copy of it. The GELU is five operators, four of which save
    fp32 tensors. Each dropout saves a mask. A decoder layer has a causal copy of the position bias.
    """
    hidden, value_bytes = widths.hidden, execution.value_bytes
    norm = (FP32 + execution.residual_bytes + value_bytes) * hidden
    attention = norm + value_bytes * 2 * (widths.query + widths.key_value) + hidden
    feed_forward = norm + hidden + (4 * FP32 + 3 * value_bytes + 1) * widths.feed_forward
    causal_bias = _bias_bytes(widths, execution) / (execution.tokens / 2)
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


def _bias_bytes(widths: Widths, execution: LayerExecution) -> float:
    """Return the bytes of T5's position bias, which all sequences share."""
    if widths.family.has_post_norms:
        return 0.0
    return float(execution.value_bytes * widths.heads * execution.sequence_len**2)


def autocast_copy_bytes(run: PlannedRun) -> float:
    """Return the bytes of autocast's half-precision copies of the weights.

    Zero if FSDP gathers weights in half precision.
    """
    execution = run.execution
    if execution.value_bytes >= execution.residual_bytes or run.gathers_half:
        return 0.0
    copied = 1 - run.share_in_fp8  # layers in FP8 quantize their fp32 weights
    return copied * run.size.whole.total * execution.value_bytes / execution.residual_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """Bytes of activations at several moments of a step."""

    all: float
    """saved by all layers and by the norm before the head, at the end of the forward pass"""
    at_last: float
    """during the backward pass of the last layer, which comes first"""
    at_second: float
    """during the backward pass of the layer above the lowest one that needs one"""
    at_first: float
    """during the backward pass of the lowest layer that needs one"""
    of_stream: float
    """gradient of the residual stream"""


def estimate_activations(run: PlannedRun, execution: LayerExecution) -> Activations:
    """Estimate the activations that the layers save, and those their backward pass needs."""
    widths = _widths_on_rank(run)
    tokens, hidden = execution.tokens, widths.hidden
    stream = execution.residual_bytes * hidden
    value_bytes, norm_bytes = execution.value_bytes, execution.norm_bytes()
    whole, own = (layer_bytes(widths, execution, mode) for mode in ("none", run.recompute))
    # Recurrent layers compute whole rows on each of the ranks that share them.
    is_shared, share = run.context_size > 1, run.model.recurrent_share
    gathered = (run.context_size - 1) * (_attention_bytes(widths, execution) + value_bytes * hidden)
    gathered *= is_shared and share > 0
    if run.recompute == "selective":
        own += (run.context_size - 1) * share * value_bytes * (widths.query + 2 * widths.key_value)
    exchanged, of_keys, masks = _exchange_bytes(run, widths, execution)
    whole += exchanged
    own += exchanged * (run.recompute == "none")
    if run.model.is_pair:  # a token passes through either the encoder or the decoder
        tokens //= 2
        of_layer = _bart_layer_bytes if widths.family.has_post_norms else _t5_layer_bytes
        whole = of_layer(widths, execution)
        own = whole if run.recompute == "none" else own
    recomputed = run.recomputed_layers
    saved = widths.layers - recomputed
    of_layers = recomputed * own + saved * (whole + share * gathered)
    working = at_last = _working(run, widths, execution, of_keys)
    if recomputed:
        chunk = run.feed_forward_share
        whole -= (1 - chunk) * _feed_forward_bytes(widths, execution)
        working = _working(run, widths, execution, of_keys, chunk)
    if run.recomputes_last:
        at_last = whole + gathered - own + working
        if norm_bytes != execution.residual_bytes:  # the norm saves another copy
            at_last += stream
    if not recomputed and not run.model.trains_embedding:
        of_layers -= norm_bytes * hidden  # the first norm's input needs no gradient
    # With offload, another input is on the GPU: that of the next layer, which the lowest has not.
    waiting = stream if run.recompute == "offload" else 0
    unpacked = _bytes_of_copy(run) * run.model.largest_matrix
    # One for the encoder, one for the decoder, and the zeros that are passed to cross-attention.
    shared = _BATCH_BYTES * run.tokens + masks
    shared += run.model.is_pair * 3 * _bias_bytes(widths, execution)
    if run.stage is not None:  # those of the other micro-batches on their way
        shared += (run.stage.in_flight - 1) * tokens * of_layers
    at_first = tokens * (whole + gathered + working) + unpacked + shared
    return Activations(
        all=tokens * (of_layers + (norm_bytes + value_bytes) * hidden + waiting) + shared,
        at_last=tokens * (of_layers + at_last + waiting) + unpacked + shared,
        at_second=at_first + tokens * waiting,
        at_first=at_first,
        of_stream=float(tokens * stream),
    )


def _exchange_bytes(
    run: PlannedRun, widths: Widths, execution: LayerExecution
) -> tuple[float, float, float]:
    """Return the bytes that a layer of sliced rows needs on top.

    Those that it saves per token, those of gradients of gathered keys per token, and of masks.
    """
    value_bytes, size = execution.value_bytes, run.context_size
    if size == 1:
        return 0.0, 0.0, 0.0
    if gather_reason(widths.heads, widths.key_heads, size) is None:
        # The output of attention, by head: by token it is saved anyway. And repeated key heads.
        repeated = key_repeats(widths.heads, widths.key_heads, size) - 1
        return value_bytes * (widths.query + 2.0 * repeated * widths.key_value), 0.0, 0.0
    # A rank adds masks, which its layers share, to the scores of its queries and the keys before.
    masks = value_bytes * execution.sequence_len**2 / (2 * size)
    # Kernels with masks need key heads to be repeated. The pieces of a row, which see half of it on
    # average, add their gradients of keys and values to the sums of these.
    gathered, copied = (2.0 * value_bytes * width for width in (widths.key_value, widths.query))
    saved = (size - 1) * gathered + size * copied * (widths.query > widths.key_value)
    return saved, 1.5 * size * copied, masks


def _widths_on_rank(run: PlannedRun) -> Widths:
    """Return the widths of the layers that save activations, as tensor parallelism splits them."""
    # Layers below the lowest trainable one save nothing: the backward pass ends above them.
    widths, split = replace(run.model.widths, layers=run.model.trained_layers), run.tensor_size
    return replace(
        widths,
        query=widths.query // split,
        key_value=widths.key_value // split,
        feed_forward=widths.feed_forward // split,
        heads=max(1, widths.heads // split),
    )


def _bytes_of_copy(run: PlannedRun) -> int:
    """Return the bytes per weight of the copy of a matrix that a layer makes to compute with it."""
    if run.share_in_fp8:  # a transposed one, and what it is quantized to
        return 1 + (HALF if run.gathers_half else FP32)
    # FP8 makes a transposed copy, the others one in half precision.
    return {"none": 0, "fp8": 1}.get(run.quantization.method, HALF)


def _working(
    run: PlannedRun, widths: Widths, execution: LayerExecution, of_keys: float, chunk: float = 1.0
) -> float:
    """Return the peak temporary bytes per token in a layer's backward pass.

    Counted on top of the activations that the layer has saved. `of_keys`: of gradients of gathered
    keys. `chunk`: the share of the tokens whose feed-forward is in memory at once.
    """
    value_bytes, hidden = execution.value_bytes, widths.hidden
    stream = execution.residual_bytes * hidden
    of_feed_forward = _feed_forward_bytes(widths, execution)
    working = _working_of_feed_forward(run, widths, execution)
    if chunk < 1:
        by_chunk = chunk * (working + value_bytes * hidden) + value_bytes * hidden
        # The gradients of attention may take more: of its output, q, k and v. By then the
        # feed-forward is finished, with its norm.
        of_attention = 2 * value_bytes * (widths.query + widths.key_value - hidden)
        working = stream + max(by_chunk, of_attention - chunk * of_feed_forward)
    if execution.keeps_scores:
        scores = _SCORE_TEMPORARIES * value_bytes * widths.heads * execution.sequence_len
        # The backward pass of the feed-forward is finished by then.
        working = max(working, scores - of_feed_forward)
    return max(working, of_keys - chunk * of_feed_forward)


def _working_of_feed_forward(run: PlannedRun, widths: Widths, execution: LayerExecution) -> float:
    """Return the peak temporary bytes per token in the backward pass of a feed-forward."""
    hidden, inner, width = widths.hidden, widths.feed_forward, execution.value_bytes
    stream = execution.residual_bytes * hidden
    if execution.scaled_inputs:
        scaled = execution.adapter_value_bytes * execution.scaled_inputs
        return _VECTOR_TEMPORARIES * scaled + stream
    if execution.output_copies:
        # Three products and a cast of the gate's matrices, in the adapter's dtype.
        temporaries = (_VECTOR_TEMPORARIES + 1) * execution.adapter_value_bytes
        return (temporaries - width) * inner - execution.output_copies * width * hidden + 2 * stream
    if not widths.kind.is_gated and widths.kind.activation in _GELU_OPERATORS:
        return (_GELU_TEMPORARIES * FP32 - width) * inner + 2 * stream
    if widths.routed_copies:
        return _EXPERT_TEMPORARIES * width * widths.routed_copies / 2 * hidden + stream
    if execution.fuses_gate(widths):  # its gradients overwrite its inputs
        return width * inner + stream
    if execution.fuses_norm_and_gate:
        return 2 * width * inner + 2 * stream
    # Either the gate's product, or the norm below the feed-forward, which is finished by then.
    of_norm = _NORM_TEMPORARIES * FP32 * hidden - 4 * width * inner - width * hidden
    return max(2 * width * inner + stream, of_norm) + stream


def estimate_loss(run: PlannedRun, execution: LayerExecution) -> tuple[float, float]:
    """Return the bytes of the loss at its peak, and those saved until the end of the step.

    A chunk's buffers are freed before the next one's are filled. The head's gradients are computed
    with the loss and saved in its graph.
    """
    model, hidden = run.model, run.model.widths.hidden
    if not model.has_head:
        return 0.0, 0.0
    value_bytes = execution.value_bytes
    if model.widths.family.has_post_norms:
        states = execution.tokens / 2 * hidden * value_bytes
        whole = _WHOLE_LOGITS * FP32 * execution.tokens / 2 * model.widths.vocabulary
        return 2 * states + whole, states
    split = 1 if model.widths.vocabulary % run.tensor_size else run.tensor_size
    vocabulary = model.widths.vocabulary // split
    rows = rows_per_chunk(vocabulary, "cuda" if run.is_on_gpu else "cpu")
    has_kernel = run.fuses_loss and run.tensor_size == 1 and run.is_on_gpu
    if has_kernel:
        rows *= TRAINED_CHUNKS if model.trains_head else FUSED_CHUNKS
    rows = min(execution.tokens, rows)
    num_chunks = -(-execution.tokens // rows)
    of_logit = value_bytes if has_kernel else FP32 if value_bytes == FP32 else _LOSS_BYTES
    chunk, product = float(rows * vocabulary * of_logit), rows * hidden * value_bytes
    head = model.head_weights // split if model.trains_head else 0
    states = execution.tokens * hidden * value_bytes
    total = 0 if num_chunks == 1 else value_bytes if num_chunks == 2 else FP32
    summed = (
        value_bytes if num_chunks == 1 else FP32 + value_bytes * (2 if value_bytes < FP32 else 1)
    )
    peak = chunk + max(head * total, product + head * summed)
    # The hidden states of trained positions are copied; their gradients stay.
    return 2 * states + peak, float(states + head * value_bytes)
