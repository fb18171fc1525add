"""LoRA beside a frozen matrix as one step: the same values, fewer passes over the activations.

peft scales one product and adds it to another, each into a new tensor of the output's size, and the
backward pass does as much again. Here each sum is part of a product.
"""

from __future__ import annotations

from typing import Any

import peft
import torch
from torch import Tensor


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
        x = x.to(dtype)
        output: Tensor = _LoraLinear.apply(
            x,
            self.lora_dropout[name](x),
            weight.to(dtype),
            None if bias is None else bias.to(dtype),
            a.to(dtype),
            b.to(dtype),
            self.scaling[name],
        )
        return output


class _LoraLinear(torch.autograd.Function):
    """W x + bias + scale B A d(x); `dropped` is d(x), the very tensor x where nothing drops."""

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
    ) -> Tensor:
        output = torch.nn.functional.linear(x, weight, bias)
        rows = dropped.flatten(0, -2)
        low = rows @ a.T
        # Not in place: selective recompute keeps what a frozen matrix gave.
        output = torch.addmm(output.flatten(0, -2), low, b.T, alpha=scale).view_as(output)
        ctx.save_for_backward(rows, low, weight, a, b)
        ctx.scale, ctx.drops = scale, dropped is not x
        return output

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, d(x), A and B; W and bias are frozen."""
        rows, low, weight, a, b = ctx.saved_tensors
        grad = outer[0].flatten(0, -2)
        grad_low = (grad @ b).mul_(ctx.scale)
        grad_a, grad_b = grad_low.T @ rows, (grad.T @ low).mul_(ctx.scale)
        shape = (*outer[0].shape[:-1], a.shape[1])
        grad_x = grad_dropped = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ weight
            if ctx.drops:
                grad_dropped = (grad_low @ a).view(shape)
            else:
                grad_x.addmm_(grad_low, a)
            grad_x = grad_x.view(shape)
        return grad_x, grad_dropped, None, None, grad_a, grad_b, None
