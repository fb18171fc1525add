"""LoRA layers that read the same input as one step: q, k and v; gate and up.

Their A are stacked, so that the input is read once for all, forward and for the gradient of A; the
gradients of the input are added up inside of the products.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from app.model.adapter.fused import Read, fused_dtype, matrix_beside_lora


@dataclass(eq=False)
class LoraGroup:
    """Fused layers of one module that were given the same input; the first computes for all."""

    layers: Sequence[Any]
    _input: weakref.ref[Tensor] | None = None
    _waiting: dict[int, Tensor] = field(default_factory=dict)
    """outputs that were computed already, by the place of their layer"""

    def take(self, layer: Any, x: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return a layer's output for x [..., features]; None where it must compute it alone."""
        place = self.layers.index(layer)
        if place > 0:
            given = self._input and self._input()
            return self._waiting.pop(place, None) if given is x else None
        self._waiting.clear()
        if not layer.training or not torch.is_grad_enabled():
            return None
        if any(fused_dtype(other, x) != dtype for other in self.layers):
            return None
        first, *others = self._compute(x, dtype)
        self._input, self._waiting = weakref.ref(x), dict(enumerate(others, 1))
        return first

    def _compute(self, x: Tensor, dtype: torch.dtype) -> list[Tensor]:
        name = self.layers[0].active_adapters[0]
        stored, reads = zip(*(layer.stored(dtype) for layer in self.layers), strict=True)
        biases = [layer.base_layer.bias for layer in self.layers]
        outputs = _LoraTogether.apply(
            x.to(dtype).flatten(0, -2),
            self.layers[0].scaling[name],
            reads,
            torch.cat([layer.lora_A[name].weight for layer in self.layers]).to(dtype),
            *stored,
            *(None if bias is None else bias.to(dtype) for bias in biases),
            *(layer.lora_B[name].weight.to(dtype) for layer in self.layers),
        )
        return [output.unflatten(0, x.shape[:-1]) for output in outputs]


class _LoraTogether(torch.autograd.Function):
    """W_i x + bias_i + scale B_i A_i x for all i; `stacked` are the A_i, one below the other."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: float, reads: Sequence[Read], stacked: Tensor, *rest: Any
    ) -> tuple[Tensor, ...]:
        count = len(reads)
        weights, biases, bs = rest[:count], rest[count : 2 * count], rest[2 * count :]
        ctx.scale, ctx.reads = scale, reads
        low = torch.nn.functional.linear(x, stacked)
        ctx.save_for_backward(x, low, stacked, *weights, *bs)
        parts = low.split([b.shape[1] for b in bs], 1)
        return tuple(
            matrix_beside_lora(x, read(weight), bias, part, b, scale)
            for read, weight, bias, b, part in zip(reads, weights, biases, bs, parts, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Any, ...]:
        """The gradients of x, of the stacked A and of each B; weights and biases are frozen."""
        x, low, stacked, *rest = ctx.saved_tensors
        count = len(ctx.reads)
        weights, bs = rest[:count], rest[count:]
        parts = low.split([b.shape[1] for b in bs], 1)
        grad_low = torch.cat([grad @ b for grad, b in zip(outer, bs, strict=True)], 1)
        grad_low.mul_(ctx.scale)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad_low @ stacked
            for grad, weight, read in zip(outer, weights, ctx.reads, strict=True):
                grad_x.addmm_(grad, read(weight))
        grad_bs = [(grad.T @ part).mul_(ctx.scale) for grad, part in zip(outer, parts, strict=True)]
        return grad_x, None, None, grad_low.T @ x, *[None] * (2 * count), *grad_bs
