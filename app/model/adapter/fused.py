"""LoRA beside a frozen matrix as one step: the same values, fewer passes over the activations.

peft scales one product and adds it to another, each into a new tensor of the output's size, and the
backward pass does as much again. Here each sum is part of a product; in fp32 on a CPU, where a
matrix is smaller than what it is multiplied with, B A is added to the matrix before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import torch
from torch import Tensor

from app.model.cpu import fp32 as onednn


class FusedLoraLinear(peft.tuners.lora.Linear):
    """peft's own layer, with another forward while it trains one plain LoRA on a frozen matrix."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the matrix's output with the adapter's added; in every other case peft's own."""
        name = self.active_adapters[0] if len(self.active_adapters) == 1 else ""
        is_plain = (
            name in self.lora_A
            and name not in self.lora_variant
            and not (args or kwargs or self.merged or self.disable_adapters)
            and not self.base_layer.weight.requires_grad
            and not torch.compiler.is_compiling()
        )
        if not is_plain:
            return super().forward(x, *args, **kwargs)
        weight, bias = self.base_layer.weight, self.base_layer.bias
        a, b = self.lora_A[name].weight, self.lora_B[name].weight
        dtype = x.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
        elif dtype != a.dtype:  # in which of the two to compute is for peft to say
            return super().forward(x)
        # Not reshaped inside the function: models add to a layer's output in place (Falcon).
        rows = x.to(dtype).flatten(0, -2)
        output: Tensor = _LoraLinear.apply(
            rows,
            self.lora_dropout[name](rows),
            weight.to(dtype),
            None if bias is None else bias.to(dtype),
            a.to(dtype),
            b.to(dtype),
            self.scaling[name],
            # What is measured is computed as without an adapter, to compare with the base exactly.
            onednn.linear if self.training else torch.nn.functional.linear,
        )
        return output.unflatten(0, x.shape[:-1])


def _is_smaller(weight: Tensor, rows: Tensor) -> bool:
    return onednn.is_faster(rows) and len(rows) >= max(weight.shape)


class _LoraLinear(torch.autograd.Function):
    """W x + bias + scale B A d(x), for rows x; `dropped` is d(x), or x itself if nothing drops."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dropped: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scale: float,
        linear: Callable[..., Tensor],
    ) -> Tensor:
        ctx.scale, ctx.drops, ctx.linear = scale, dropped is not x, linear
        ctx.adds_before = not ctx.drops and linear is onednn.linear and _is_smaller(weight, x)
        if ctx.adds_before:
            ctx.save_for_backward(x, None, weight, a, b)
            return linear(x, torch.addmm(weight, b, a, alpha=scale), bias)
        output, low = linear(x, weight, bias), linear(dropped, a)
        ctx.save_for_backward(dropped, low, weight, a, b)
        if len(weight) > weight.shape[1]:
            return output.addmm_(low, b.T, alpha=scale)
        # Selective recompute keeps what a frozen matrix gave that does not widen.
        return torch.addmm(output, low, b.T, alpha=scale)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, d(x), A and B; W and bias are frozen."""
        dropped, low, weight, a, b = ctx.saved_tensors
        grad = outer[0]
        if ctx.adds_before:
            low = ctx.linear(dropped, a)
        grad_low = ctx.linear(grad, b.T).mul_(ctx.scale)
        grad_a, grad_b = grad_low.T @ dropped, (grad.T @ low).mul_(ctx.scale)
        grad_x = grad_dropped = None
        if ctx.needs_input_grad[0]:
            if ctx.adds_before:
                weight = torch.addmm(weight, b, a, alpha=ctx.scale)
            grad_x = ctx.linear(grad, weight.T)
            if ctx.drops:
                grad_dropped = grad_low @ a
            elif not ctx.adds_before:
                grad_x.addmm_(grad_low, a)
        return grad_x, grad_dropped, None, None, grad_a, grad_b, None, None
