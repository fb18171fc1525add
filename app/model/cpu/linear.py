"""Products with a matrix in fp32 on the CPU: a training's by oneDNN, which is a tenth faster.

PyTorch takes oneDNN for half precision and another library for fp32. The operator is the one that
`torch.compile` takes for frozen models; nothing public reaches oneDNN's fp32 products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROWS = 64
"""a row count that is no multiple of this comes once, and oneDNN makes a kernel for each"""


def is_faster(rows: Tensor) -> bool:
    """Say whether oneDNN is the faster way to multiply these rows by a matrix."""
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
    """Return what a linear layer does whose weight trains; hidden [..., width]."""
    if torch.is_autocast_enabled(hidden.device.type):
        return torch.nn.functional.linear(hidden, weight, bias)
    output: Tensor = _TrainedLinear.apply(hidden.flatten(0, -2), weight, bias)
    return output.unflatten(0, hidden.shape[:-1])


class _TrainedLinear(torch.autograd.Function):
    """rows @ weight.T + bias; a weight's gradient, of few rows, gains nothing by oneDNN."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return linear(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of what needs one."""
        rows, weight = ctx.saved_tensors
        grad = outer[0]
        of_rows, of_weight, of_bias = ctx.needs_input_grad
        return (
            linear(grad, weight.T) if of_rows else None,
            grad.T @ rows if of_weight else None,
            grad.sum(0) if of_bias else None,
        )
