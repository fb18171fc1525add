"""The head and its loss in one: cross-entropy of a linear layer's logits, a chunk at a time.

Never holds the logits of all positions. Gradients are computed in the forward pass, where a chunk's
probabilities are at hand, and only scaled in the backward one: a frozen head costs no weight
gradient, a validation no gradient at all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from app.model import onednn

LOGITS_PER_CHUNK = 2**25
"""logits held at once: 128 MiB in fp32, enough for the products to run at full speed"""
CPU_LOGITS, CPU_ROWS = 2**21, 256
"""a chunk on a CPU: logits that stay in its cache, unless the products get too few rows"""
GPU_ROWS = 1024
"""positions a chunk has at least on a GPU: a product of fewer waits for the weight that it reads"""
GPU_TILE = 128
"""rows that a GPU's products take together"""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    loss_weights: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the sum of loss times weight, and each position's loss in nats, fp32 and detached.

    hidden [positions, width], weight [vocabulary, width], bias [vocabulary]; labels [positions] are
    what each position predicts, -100 where nothing is learned (loss 0); loss_weights [positions].
    `softcap` bounds the logits to softcap * tanh(logits / softcap), as Gemma 2 does. Under autocast
    the products are taken in its dtype, all else in fp32.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    num_positions = len(labels)
    if device == "cpu" and (missing := -num_positions % onednn.ROWS):
        hidden = torch.nn.functional.pad(hidden, (0, 0, 0, missing))
        labels = torch.nn.functional.pad(labels, (0, missing), value=-100)
        loss_weights = torch.nn.functional.pad(loss_weights, (0, missing))
    arguments = (hidden.to(dtype), weight.to(dtype), bias, labels, loss_weights, softcap)
    with torch.autocast(device, enabled=False):
        total, losses = _LinearCrossEntropy.apply(*arguments)
    return total, losses[:num_positions]


def rows_per_chunk(vocabulary: int, device: str) -> int:
    """Return how many positions have their logits at hand at once."""
    rows = max(1, LOGITS_PER_CHUNK // vocabulary)
    if device == "cpu":
        rows = min(rows, max(CPU_LOGITS // vocabulary, CPU_ROWS))
        return rows - rows % onednn.ROWS or rows
    rows = max(rows, GPU_ROWS)
    return rows - rows % GPU_TILE


class _LinearCrossEntropy(torch.autograd.Function):
    """Losses and gradients, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        loss_weights: Tensor,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        losses = torch.empty(len(labels), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if of_hidden else None
        # Sums over chunks stay in fp32: in half precision small parts would be lost.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if of_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if of_bias else None
        linear = onednn.linear if any(ctx.needs_input_grad[:3]) else torch.nn.functional.linear
        size = rows_per_chunk(len(weight), hidden.device.type)
        for start in range(0, len(labels), size):
            chunk = slice(start, start + size)
            rows = hidden[chunk]
            logits = linear(rows, weight).float()
            if bias is not None:
                logits += bias
            slope = None
            if softcap is not None:
                bounded = logits.div_(softcap).tanh_()
                slope = 1 - bounded.square() if any(ctx.needs_input_grad[:3]) else None
                logits = bounded.mul_(softcap)

            is_learned = labels[chunk] >= 0
            target = labels[chunk].clamp(min=0).unsqueeze(1)
            highest = logits.amax(1, keepdim=True)
            own = logits.gather(1, target)
            exponentials = logits.sub_(highest).exp_()
            sums = exponentials.sum(1, keepdim=True)
            losses[chunk] = (sums.log() + highest - own).squeeze(1) * is_learned
            if not any(ctx.needs_input_grad[:3]):
                continue

            scale = (loss_weights[chunk] * is_learned).float().unsqueeze(1)
            grad = exponentials.mul_(scale / sums).scatter_add_(1, target, -scale)
            if slope is not None:
                grad *= slope
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[chunk] = linear(grad, weight.T)
            if grad_weight is not None:
                grad_weight += grad.T @ rows
        ctx.grads = (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
        )
        ctx.mark_non_differentiable(losses)
        return (losses * loss_weights).sum(), losses

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        """Scale by the gradient of the sum."""
        scaled = (None if grad is None else grad * outer[0] for grad in ctx.grads)
        return (*scaled, None, None, None)
