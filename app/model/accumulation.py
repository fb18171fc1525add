"""Trained linear layers that add a micro-batch's gradient to earlier ones in the product itself.

Autograd writes the gradient of a weight first and adds it in a pass of its own, which reads two
tensors and writes one: for a weight of each micro-batch after the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from app.model.activation_checkpointing import product_once
from app.model.layers import replaced


class _Accumulation:
    # Not a context variable: autograd runs the backward pass of a GPU in a thread of its own.
    is_on = False


@contextmanager
def accumulating_in_products(is_on: bool = True) -> Iterator[None]:
    """Add the gradients of `accumulated_linear` to `weight.grad`, past autograd's hooks."""
    with replaced([(_Accumulation, "is_on", is_on)]):
        yield


def accumulated_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return hidden @ weight.T + bias; hidden [..., width], weight [features, width], a parameter.

    Under autocast it is PyTorch's own: gradients have another dtype than products then.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        return torch.nn.functional.linear(hidden, weight, bias)
    output: Tensor = _AccumulatedLinear.apply(hidden.flatten(0, -2), weight, bias)
    return output.unflatten(0, hidden.shape[:-1])


class _AccumulatedLinear(torch.autograd.Function):
    """rows @ weight.T + bias."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.weight = weight  # itself: a recompute would return a copy without its gradient
        return product_once(*weight.shape, torch.nn.functional.linear, rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients that are needed and not yet added."""
        (rows,), weight, grad = ctx.saved_tensors, ctx.weight, outer[0]
        rows_need_grad, weight_needs_grad, bias_needs_grad = ctx.needs_input_grad
        grad_weight = None
        if weight_needs_grad and _Accumulation.is_on and weight.grad is not None:
            weight.grad.addmm_(grad.T, rows)
        elif weight_needs_grad:
            grad_weight = grad.T @ rows
        return (
            grad @ weight if rows_need_grad else None,
            grad_weight,
            grad.sum(0) if bias_needs_grad else None,
        )
