"""Estimate the activation memory of a GPU at the moments of a step, and the memory of the loss.

The bytes of one layer come from `app.model.activation_memory`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from app.model.activation_memory import (
    FP32,
    FUSED_CHUNKS,
    GELU_OPERATORS,
    HALF,
    LOSS_BYTES,
    POST_NORMS,
    TRAINED_CHUNKS,
    LayerExecution,
    bias_bytes,
    encoder_decoder_layer_bytes,
    feed_forward_bytes,
    layer_bytes,
    rows_per_chunk,
)
from app.model.layer_kind import Widths
from app.strategy.settings import FsdpConfig

if TYPE_CHECKING:
    from app.planning.memory import PlannedRun

NORM_TEMPORARIES = 5
"""fp32 tensors of hidden states that are alive at once in the backward pass of an unfused norm"""
VECTOR_TEMPORARIES = 3
"""tensors of IA3's scaled features that are alive at once in the backward pass"""
EXPERT_TEMPORARIES = 3
"""tensors of the experts' outputs that are alive at once in the backward pass of their weighting"""
SCORE_TEMPORARIES = 2
"""tensors of attention scores, besides the saved probabilities, that are alive at once in the
backward pass of attention that is not one kernel"""
GELU_TEMPORARIES = 3
"""fp32 tensors of features, besides the saved input, that are alive at once in the backward pass of
a GELU made of several operators"""
WHOLE_LOGITS = 3
"""fp32 tensors of the logits that are alive at once if the loss is not computed in chunks"""


def autocast_copy_bytes(run: PlannedRun, weights: float) -> float:
    """Return the bytes of autocast's half-precision copies of `weights`, in bytes.

    Zero for FSDP, which gathers weights in half precision.
    """
    execution = run.execution
    if execution.value_bytes >= execution.residual_bytes or isinstance(run.strategy, FsdpConfig):
        return 0.0
    return weights * execution.value_bytes / execution.residual_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """Bytes of activations at several moments of a step."""

    all: float
    """saved by all layers and by the norm before the head, at the end of the forward pass"""
    at_last: float
    """during the backward pass of the last layer, which comes first"""
    at_first: float
    """during the backward pass of the lowest layer that needs one"""
    of_stream: float
    """gradient of the residual stream"""


def estimate_activations(run: PlannedRun, execution: LayerExecution) -> Activations:
    """Estimate the activations that the layers save, and those their backward pass needs."""
    # Layers below the lowest trainable one save nothing: the backward pass ends above them.
    widths, split = replace(run.model.widths, layers=run.model.trained_layers), run.tensor_size
    if split > 1:  # tensor parallelism splits heads and features over the ranks
        widths = replace(
            widths,
            query=widths.query // split,
            key_value=widths.key_value // split,
            feed_forward=widths.feed_forward // split,
            heads=max(1, widths.heads // split),
        )
    tokens, hidden, stream = run.tokens, widths.hidden, execution.residual_bytes * widths.hidden
    value_bytes, norm_bytes = execution.value_bytes, execution.norm_bytes()
    whole, own = (layer_bytes(widths, execution, mode) for mode in ("none", run.recompute))
    if run.model.is_pair:  # a token passes through either the encoder or the decoder
        tokens //= 2
        whole = encoder_decoder_layer_bytes(widths, execution)
        own = whole if run.recompute == "none" else own
    recomputed = 0 if run.recompute == "none" else -(-widths.layers // run.recompute_every)
    of_layers = recomputed * own + (widths.layers - recomputed) * whole
    again = whole - own
    if recomputed and norm_bytes != execution.residual_bytes:  # the norm saves another copy
        again += stream
    if not recomputed and not run.model.trains_embedding:
        of_layers -= norm_bytes * hidden  # the first norm's input needs no gradient
    # With offload, the inputs of two layers are on the GPU: the current one and the next.
    waiting = 2 * stream if run.recompute == "offload" else 0
    working = _working(run, widths, execution) + waiting
    if execution.keeps_scores:
        scores = SCORE_TEMPORARIES * value_bytes * widths.heads * execution.sequence_len
        # The backward pass of the feed-forward is finished by then.
        working = max(working, scores - feed_forward_bytes(widths, execution))
    unpacked = 0 if run.quantization.method == "none" else HALF * run.model.largest_matrix
    # One for the encoder, one for the decoder, and the zeros that are passed to cross-attention.
    biases = 3 * bias_bytes(widths, execution) if run.model.is_pair else 0.0
    return Activations(
        all=tokens * (of_layers + (norm_bytes + value_bytes) * hidden + waiting) + biases,
        at_last=tokens * (of_layers + again + working) + unpacked + biases,
        at_first=tokens * (whole + working) + unpacked + biases,
        of_stream=float(tokens * stream),
    )


def _working(run: PlannedRun, widths: Widths, execution: LayerExecution) -> float:
    """Return the peak temporary bytes per token in a layer's backward pass.

    Counted on top of the activations that the layer has saved.
    """
    hidden, inner, width = widths.hidden, widths.feed_forward, execution.value_bytes
    stream = execution.residual_bytes * hidden
    if execution.scaled_inputs:
        return VECTOR_TEMPORARIES * execution.adapter_value_bytes * execution.scaled_inputs + stream
    if execution.output_copies:
        # Three products and a cast of the gate's matrices, in the adapter's dtype.
        temporaries = (VECTOR_TEMPORARIES + 1) * execution.adapter_value_bytes
        return (temporaries - width) * inner - execution.output_copies * width * hidden + 2 * stream
    if not widths.kind.is_gated and widths.kind.activation in GELU_OPERATORS:
        return (GELU_TEMPORARIES * FP32 - width) * inner + 2 * stream
    if widths.routed_copies:
        return EXPERT_TEMPORARIES * width * widths.routed_copies / 2 * hidden + stream
    if execution.fuses_gate(widths):  # its gradients overwrite its inputs
        return width * inner + stream
    if execution.fuses_norm_and_gate:
        return 2 * width * inner + 2 * stream
    # Either the gate's product, or the norm below the feed-forward, which is finished by then.
    of_norm = NORM_TEMPORARIES * FP32 * hidden - 4 * width * inner - width * hidden
    return max(2 * width * inner + stream, of_norm) + stream


def estimate_loss(run: PlannedRun, execution: LayerExecution) -> tuple[float, float]:
    """Return the bytes of the loss at its peak, and those saved until the end of the step.

    A chunk's buffers are freed before the next one's are filled. The head's gradients are computed
    with the loss and saved in its graph.
    """
    model, hidden = run.model, run.model.widths.hidden
    value_bytes = execution.value_bytes
    if model.widths.model_type in POST_NORMS:
        states = run.tokens / 2 * hidden * value_bytes
        whole = WHOLE_LOGITS * FP32 * run.tokens / 2 * model.widths.vocabulary
        return 2 * states + whole, states
    splits = run.tensor_size > 1 and model.widths.vocabulary % run.tensor_size == 0
    vocabulary = model.widths.vocabulary // (run.tensor_size if splits else 1)
    rows = rows_per_chunk(vocabulary, "cuda" if run.is_on_gpu else "cpu")
    has_kernel = run.fuses_loss and run.fuses_layers and run.is_on_gpu
    if has_kernel:
        rows *= TRAINED_CHUNKS if model.trains_head else FUSED_CHUNKS
    rows = min(run.tokens, rows)
    num_chunks = -(-run.tokens // rows)
    of_logit = value_bytes if has_kernel else FP32 if value_bytes == FP32 else LOSS_BYTES
    chunk, product = float(rows * vocabulary * of_logit), rows * hidden * value_bytes
    head = model.head_weights if model.trains_head else 0
    states = run.tokens * hidden * value_bytes
    total = 0 if num_chunks == 1 else value_bytes if num_chunks == 2 else FP32
    summed = (
        value_bytes if num_chunks == 1 else FP32 + value_bytes * (2 if value_bytes < FP32 else 1)
    )
    peak = chunk + max(head * total, product + head * summed)
    # The hidden states of trained positions are copied; their gradients stay.
    return 2 * states + peak, float(states + head * value_bytes)
