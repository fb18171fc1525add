"""What a run's activations take of a GPU at the moments of a step, and its loss beside them.

The bytes of a layer are those of `app.model.activation_memory`.
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

NORM_TEMPORARIES, VECTOR_TEMPORARIES, EXPERT_TEMPORARIES, SCORE_TEMPORARIES = 5, 3, 3, 2
"""tensors that a backward pass has at once: in fp32 of hidden states, of a norm by PyTorch's
operators; of the features that IA3 scales; of each expert's output when they are weighted; and of
scores, beside their probabilities, where attention is not one kernel"""

GELU_TEMPORARIES, WHOLE_LOGITS = 3, 3
"""tensors in fp32 that it has at once: of the features of a GELU by operators of its own, beside
what was read of it; and of logits that are computed whole"""


def autocast_copy_bytes(run: PlannedRun, weights: float) -> float:
    """Return the bytes of autocast's copies of `weights`; FSDP gathers them in half already."""
    execution = run.execution
    if execution.value_bytes >= execution.residual_bytes or isinstance(run.strategy, FsdpConfig):
        return 0.0
    return weights * execution.value_bytes / execution.residual_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """Bytes of activations at moments of a step."""

    all: float
    """kept by all layers and by the norm before the head"""
    at_last: float
    """while the last layer, where the backward pass begins, has its gradients computed"""
    at_first: float
    """the same of the lowest layer that trains, the last one in the backward pass"""
    of_stream: float
    """the gradient of the stream between layers"""


def estimate_activations(run: PlannedRun, execution: LayerExecution) -> Activations:
    """Return what the layers keep, and need in their backward pass."""
    # Layers below the lowest one that trains keep nothing: the backward pass ends there.
    widths, split = replace(run.model.widths, layers=run.model.trained_layers), run.tensor_size
    if split > 1:  # within a layer a rank has its own heads and features
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
    if run.model.is_pair:  # a token goes through one of the two stacks
        tokens //= 2
        whole = encoder_decoder_layer_bytes(widths, execution)
        own = whole if run.recompute == "none" else own
    recomputed = 0 if run.recompute == "none" else -(-widths.layers // run.recompute_every)
    of_layers = recomputed * own + (widths.layers - recomputed) * whole
    again = whole - own
    if recomputed and norm_bytes != execution.residual_bytes:  # its norm keeps another copy
        again += stream
    if not recomputed and not run.model.trains_embedding:  # whose output needs no gradient
        of_layers -= norm_bytes * hidden
    waiting = 2 * stream if run.recompute == "offload" else 0  # a layer's own input, and the next's
    working = _working(run, widths, execution) + waiting
    if execution.keeps_scores:
        scores = SCORE_TEMPORARIES * value_bytes * widths.heads * execution.sequence_len
        # The feed-forward is done by then.
        working = max(working, scores - feed_forward_bytes(widths, execution))
    unpacked = 0 if run.quantization.method == "none" else HALF * run.model.largest_matrix
    # One of the encoder, one of the decoder, and the zeros that cross-attention is given.
    biases = 3 * bias_bytes(widths, execution) if run.model.is_pair else 0.0
    return Activations(
        all=tokens * (of_layers + (norm_bytes + value_bytes) * hidden + waiting) + biases,
        at_last=tokens * (of_layers + again + working) + unpacked + biases,
        at_first=tokens * (whole + working) + unpacked + biases,
        of_stream=float(tokens * stream),
    )


def _working(run: PlannedRun, widths: Widths, execution: LayerExecution) -> float:
    """Return the bytes a token that the backward pass of a layer has at once beside what the layer
    keeps, where they are the most.
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
    if execution.fuses_gate(widths):  # whose gradients take the place of its inputs
        return width * inner + stream
    if execution.fuses_norm_and_gate:
        return 2 * width * inner + 2 * stream
    # Below the feed-forward, which is done by then, a norm; or the gate's product.
    of_norm = NORM_TEMPORARIES * FP32 * hidden - 4 * width * inner - width * hidden
    return max(2 * width * inner + stream, of_norm) + stream


def estimate_loss(run: PlannedRun, execution: LayerExecution) -> tuple[float, float]:
    """Return the bytes of the loss at its peak, and those kept until the step's end.

    The buffers of a chunk are there until those of the next one are filled; the head's gradients
    are computed with the loss, and kept with its graph.
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
    num_chunks, second = -(-run.tokens // rows), min(1.0, run.tokens / rows - 1)
    of_logit = value_bytes if has_kernel else FP32 if value_bytes == FP32 else LOSS_BYTES
    chunk, product = float(rows * vocabulary * of_logit), rows * hidden * value_bytes
    head = model.head_weights if model.trains_head else 0
    states = run.tokens * hidden * value_bytes
    total = 0 if num_chunks == 1 else value_bytes if num_chunks == 2 else FP32
    summed = (
        value_bytes if num_chunks == 1 else FP32 + value_bytes * (2 if value_bytes < FP32 else 1)
    )
    peak = max(chunk * (1 + second) + head * total, chunk + product + head * summed)
    # The positions that are trained on are copied out of all; their gradients stay.
    return 2 * states + peak, float(states + head * value_bytes)
