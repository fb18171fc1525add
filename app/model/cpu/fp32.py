"""Linear layers and RMS norms in fp32 on the CPU, faster than PyTorch's.

Matrix products use oneDNN (10 % faster), which PyTorch uses only for half precision. The operator
is the one that `torch.compile` uses for frozen models; there is no public API for oneDNN's fp32
products (torch 2.13). The norm needs half as many passes over memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROWS = 64
"""oneDNN is used for multiples of this row count; it compiles a kernel for each row count, and
others are rare"""


def is_faster(rows: Tensor) -> bool:
    """Return whether oneDNN multiplies these rows by a matrix faster than PyTorch."""
    return (
        rows.device.type == "cpu"
        and rows.dtype == torch.float32
        and len(rows) % ROWS == 0
        and torch.backends.mkldnn.is_available()
    )


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return rows @ weight.T + bias; rows [positions, width], weight [features, width]."""
    if not is_faster(rows):
        return torch.nn.functional.linear(rows, weight, bias)
    output: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return output


def trained_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a linear layer whose weight is trained; hidden [..., width]."""
    if torch.is_autocast_enabled(hidden.device.type):
        return torch.nn.functional.linear(hidden, weight, bias)
    output: Tensor = _TrainedLinear.apply(hidden.flatten(0, -2), weight, bias)
    return output.unflatten(0, hidden.shape[:-1])


class _TrainedLinear(torch.autograd.Function):
    """rows @ weight.T + bias; oneDNN is not faster for the gradient of the weight."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return linear(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs that need one."""
        rows, weight = ctx.saved_tensors
        grad = outer[0]
        rows_need_grad, weight_needs_grad, bias_needs_grad = ctx.needs_input_grad
        return (
            linear(grad, weight.T) if rows_need_grad else None,
            grad.T @ rows if weight_needs_grad else None,
            grad.sum(0) if bias_needs_grad else None,
        )


def rms_norm(
    hidden: Tensor, weight: Tensor, eps: float, offset: float, casting: str, *_: Any
) -> Tensor:
    """Return hidden / rms(hidden) * (weight + offset) over the last axis.

    casting: "llama" rounds to hidden's dtype before the product with the weight, "gemma" after it.
    The further argument of Liger's kernel, `in_place`, is ignored.
    """
    output: Tensor = _RMSNorm.apply(hidden, weight, eps, offset, casting)
    return output


class _RMSNorm(torch.autograd.Function):
    """RMS norm computed in fp32."""

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
        """Return the gradients of hidden, and of the weight if it is trained."""
        hidden, weight, scale = ctx.saved_tensors
        normed, grad = hidden.float() * scale, outer[0].float()
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        grad_normed = grad * (weight.float() + ctx.offset)
        projection = torch.linalg.vecdot(grad_normed, normed).div_(normed.shape[-1]).unsqueeze(-1)
        grad_hidden = grad_normed.addcmul_(normed, projection, value=-1).mul_(scale)
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None
