"""Feed-forward networks of long rows, a chunk of tokens at a time.

A recomputed layer needs its feed-forward's activations for all tokens at once, which for long rows
are most of a GPU's memory. In chunks its backward pass computes one chunk after the other (arXiv
2506.13996, section 4). That costs no time: a recompute ends before the feed-forward, whose input is
the last tensor that a layer of a usual model saves.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from app.model.attention.mixers import MixerForward
from app.model.chunks import FEED_FORWARD_TOKENS
from app.model.layers import repeated_layers
from app.model.recomputed_layer import RandomState, read_autocasts, restored_autocasts

FEED_FORWARD, EXPERTS = "mlp", "experts"
"""names of the feed-forward in a layer, and of the experts in one that has some"""


class ChunkedFeedForward:
    """The forward of a feed-forward that saves only its input if there are many tokens."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module, self.whole = module, module.forward

    def restore(self) -> None:
        """Compute the chunks by the module's own forward."""
        self.whole = MethodType(type(self.module).forward, self.module)

    def __call__(self, hidden: Tensor) -> Tensor:
        needs_graph = torch.is_grad_enabled()
        if hidden.shape[:-1].numel() <= FEED_FORWARD_TOKENS or (
            needs_graph and not hidden.requires_grad
        ):
            return self.whole(hidden)
        if not needs_graph:
            return _in_chunks(self.whole, hidden)
        kept = _Kept.apply(hidden)
        weights = [each for each in self.module.parameters() if each.requires_grad]
        output: Tensor = _Chunks.apply(self.whole, kept.grad_fn, kept, *weights)
        return output


def chunk_feed_forwards(model: Any) -> None:
    """Compute the dense feed-forwards of recomputed layers in chunks; call after `fuse_layers`."""
    for layer in map(model.get_submodule, repeated_layers(model)):
        module: Any = dict(layer.named_children()).get(FEED_FORWARD)
        if module is None or not (
            isinstance(layer, GradientCheckpointingLayer) and layer.gradient_checkpointing
        ):
            continue
        takes_one = len(signature(type(module).forward).parameters) == 2  # and `self`
        has_experts = EXPERTS in dict(module.named_children())
        if takes_one and not has_experts and not isinstance(module.forward, MixerForward):
            module.forward = ChunkedFeedForward(module)


def _in_chunks(forward: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    first, *rest = _split(hidden)
    output = forward(first)
    whole = output.new_empty(hidden.shape)
    own, *others = _split(whole)  # filled one by one: a list of parts would take them twice
    own.copy_(output)
    for part, place in zip(rest, others, strict=True):
        place.copy_(forward(part))
    return whole


def _split(hidden: Tensor) -> tuple[Tensor, ...]:
    """Return contiguous [rows, tokens, width] as views [1, tokens, width]."""
    return hidden.view(1, -1, hidden.shape[-1]).split(FEED_FORWARD_TOKENS, dim=1)


class _Kept(torch.autograd.Function):
    """Save a tensor; for a recomputed layer before the feed-forward runs, so that it ends here."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class _Chunks(torch.autograd.Function):
    """Compute a feed-forward in chunks, and each of them again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        whole: Callable[[Tensor], Tensor],
        kept: Any,
        hidden: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        ctx.whole, ctx.kept, ctx.weights = whole, kept, weights
        # Casts of weights that autocast caches here would have no gradients.
        ctx.autocasts = [(*each[:3], False) for each in read_autocasts(hidden.device.type)]
        ctx.random = RandomState(hidden.device)
        with restored_autocasts(ctx.autocasts):
            return _in_chunks(whole, hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.kept.saved_tensors
        of_hidden, totals = torch.empty_like(hidden), ()
        parts = zip(_split(hidden), _split(gradients[0]), _split(of_hidden), strict=True)
        with ctx.random.restored():
            for part, gradient, place in parts:
                own = part.detach().requires_grad_()
                with torch.enable_grad(), restored_autocasts(ctx.autocasts):
                    output = ctx.whole(own)
                found = torch.autograd.grad(output, (own, *ctx.weights), gradient)
                place.copy_(found[0])
                totals = tuple(map(torch.add, totals, found[1:])) if totals else found[1:]
        return None, None, of_hidden, *totals
