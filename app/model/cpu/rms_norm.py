"""RMS norm as one step forward and one back: half the passes over memory, which a CPU feels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rms_norm(
    hidden: Tensor, weight: Tensor, eps: float, offset: float, casting: str, *_: Any
) -> Tensor:
    """Return hidden / rms(hidden) * (weight + offset) over the last axis.

    casting: "llama" rounds to hidden's dtype before the product with the weight, "gemma" after it.
    What one of Liger's kernels is given besides, whether in place, changes nothing.
    """
    output: Tensor = _RMSNorm.apply(hidden, weight, eps, offset, casting)
    return output


class _RMSNorm(torch.autograd.Function):
    """The norm, in fp32."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, eps: float, offset: float, casting: str
    ) -> Tensor:
        exact = hidden.float()
        length = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
        scale = length.square_().div_(exact.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(hidden, weight, scale)
        ctx.offset = offset
        if casting == "gemma":
            return (exact * scale).mul_(weight.float() + offset).to(hidden.dtype)
        normed = (exact * scale).to(hidden.dtype)
        return normed.mul_(weight) if weight.dtype == normed.dtype else normed * weight

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of hidden, and of the weight where it trains."""
        hidden, weight, scale = ctx.saved_tensors
        normed, grad = hidden.float() * scale, outer[0].float()
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        through = grad * (weight.float() + ctx.offset)
        along = torch.linalg.vecdot(through, normed).div_(normed.shape[-1]).unsqueeze(-1)
        grad_hidden = through.addcmul_(normed, along, value=-1).mul_(scale)
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None
