"""Count the FLOPs of a step.

Model FLOPs as in arXiv 2204.02311 (PaLM, appendix B), with half of the FLOPs of full attention for
causal attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.model.recompute import WHOLE_LAYERS

if TYPE_CHECKING:
    from app.planning.memory import PlannedRun

_ATTENTION_BACKWARD = 2.5
"""FLOPs of attention's backward pass, which computes the scores again, relative to the forward pass
(arXiv 2307.08691, section 4)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flops:
    """FLOPs per token, by operation."""

    products: float
    attention: float
    recomputed_products: float
    """those of recompute, and of forward passes of the base or a teacher for an objective"""
    recomputed_attention: float
    frozen: float
    """products with frozen matrices of layers, recomputed ones included; also part of the above"""
    forward: float
    """those of the forward pass, and of the base's own or a teacher's; also part of the above"""
    recomputed_scores: float
    """scores that the kernels of attention's backward pass compute again"""

    @property
    def model(self) -> float:
        """FLOPs without recompute, as MFU counts them."""
        return self.products + self.attention

    @property
    def total(self) -> float:
        """All FLOPs, including recompute, but not what attention's kernels compute again."""
        return self.model + self.recomputed_products + self.recomputed_attention


def estimate_flops(run: PlannedRun) -> Flops:
    """Estimate the FLOPs per token if each sequence is one document, which is the upper bound."""
    model, widths = run.model, run.model.widths
    frozen, trained = model.multiplied(trained=False), model.multiplied(trained=True)
    if model.is_pair:  # a token passes through either the encoder or the decoder
        frozen, trained = frozen / 2, trained / 2
    layers = model.num_layers / (2 if model.is_pair else 1)
    attention = 2.0 * layers * (1 - model.recurrent_share) * widths.query * run.sequence_len
    head = 2.0 * model.head_weights
    forward = 2.0 * (frozen + trained)
    # The backward pass ends at the lowest trainable layer.
    share = run.trained_share
    reached = share * model.reached
    products = forward + head + reached * forward
    products += share * (2.0 * trained + (1 + model.trains_head) * head)
    every = reached / run.recompute_every  # layers without a backward pass are not recomputed
    again = again_attention = 0.0
    if run.recompute in WHOLE_LAYERS:
        again, again_attention = forward * every, attention * every
    elif run.recompute == "selective":
        wide = 2.0 * widths.hidden * widths.feed_forward * layers
        again = 2.0 * wide * every
    of_base = 2.0 * frozen if run.runs_base else 0.0
    # Of ranks that share rows, each computes the recurrences of whole ones.
    passes = 1 + reached * (1 + (run.recompute in WHOLE_LAYERS))
    again += 2.0 * (run.context_size - 1) * passes * model.recurrent_weights
    others, others_attention = of_base + head * run.runs_base, attention * run.runs_base
    others += share * head * run.recomputes_head
    if (teacher := run.teacher) is not None:
        sides = 2 if teacher.is_pair else 1
        others += 2.0 * (teacher.multiplied(trained=False) / sides + teacher.head_weights)
        others_attention += (
            2.0 * teacher.num_layers / sides * teacher.widths.query * run.sequence_len
        )
    return Flops(
        forward=forward + head + attention + others + others_attention,
        products=products,
        attention=attention * (1 + 2 * reached),
        recomputed_products=again + others,
        recomputed_attention=again_attention + others_attention,
        frozen=of_base + (forward * (1 + reached) + again) * frozen / max(1.0, frozen + trained),
        recomputed_scores=attention * reached * (_ATTENTION_BACKWARD - 2),
    )
