"""LoRA beside a frozen matrix as one step: the same values, fewer passes over the activations.

peft scales one product and adds it to another, each into a new tensor of the output's size, and the
backward pass does as much again. Here each sum is part of a product: on a GPU of the matrix's own,
which reads what it adds to while it computes, on a CPU of LoRA's; in fp32 there, where a matrix is
smaller than what it is multiplied with, B A is added to the matrix before.

Layers that read the same input (q, k and v; gate and up) are one step together: their A are
stacked, so that the input is read once for all, forward and for the gradient of A, and the
gradients of the input are added up inside of the products.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import peft
import torch
from torch import Tensor

from app.model.activation_checkpointing import product_once
from app.model.cpu import fp32 as onednn

Linear = Callable[..., Tensor]
"""computes x W^T + bias"""
Read = Callable[[Tensor], Tensor]
"""gives the matrix that a stored weight stands for"""


def read_as_is(weight: Tensor) -> Tensor:
    """Return a weight that is stored as the matrix it is."""
    return weight


class FusedLoraLinear(peft.tuners.lora.Linear):
    """peft's own layer, with another forward while it trains one plain LoRA on a frozen matrix."""

    group: LoraGroup | None = None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the matrix's output with the adapter's added; in every other case peft's own."""
        if args or kwargs:
            return super().forward(x, *args, **kwargs)
        if self.group is not None and (waiting := self.group.waiting(self, x)) is not None:
            return waiting
        if (dtype := fused_dtype(self, x)) is None:
            return super().forward(x)
        if self.group is not None and (output := self.group.run(self, x, dtype)) is not None:
            return output
        # What is measured is computed as without an adapter, to compare with the base exactly.
        linear = onednn.linear if self.training else torch.nn.functional.linear
        return run_fused(self, x, dtype, linear)

    def stored(self, dtype: torch.dtype) -> tuple[Tensor, Read]:
        """Return the frozen weight, and what gives its matrix in `dtype`."""
        return self.base_layer.weight.to(dtype), read_as_is


def fused_dtype(layer: Any, x: Tensor) -> torch.dtype | None:
    """Return the dtype in which a layer computes in one step; None where that is for peft."""
    # Once each: attributes that `nn.Module` looks up take the host as long as the rest of it.
    active, parts = layer.active_adapters, layer._modules
    a = parts["lora_A"]._modules.get(active[0]) if len(active) == 1 else None
    if (
        a is None
        or active[0] in layer.lora_variant
        or layer.merged
        or layer.disable_adapters
        or torch.compiler.is_compiling()
        or parts["base_layer"].weight.requires_grad
    ):
        return None
    device = x.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    # In which of two dtypes to compute is for peft to say.
    return x.dtype if x.dtype == a.weight.dtype else None


def run_fused(
    layer: Any,
    x: Tensor,
    dtype: torch.dtype,
    linear: Linear = torch.nn.functional.linear,
) -> Tensor:
    """Return the output of one layer for x [..., features], computed in `dtype`."""
    name = layer.active_adapters[0]
    weight, read = layer.stored(dtype)
    bias = layer.base_layer.bias
    # Not reshaped inside the function: models add to a layer's output in place (Falcon).
    rows = x.to(dtype).flatten(0, -2)
    output: Tensor = _LoraLinear.apply(
        rows,
        layer.lora_dropout[name](rows),
        weight,
        None if bias is None else bias.to(dtype),
        layer.lora_A[name].weight.to(dtype),
        layer.lora_B[name].weight.to(dtype),
        layer.scaling[name],
        linear,
        read,
    )
    return output.unflatten(0, x.shape[:-1])


def _is_smaller(weight: Tensor, rows: Tensor) -> bool:
    return onednn.is_faster(rows) and len(rows) >= max(weight.shape)


def _adds_to_lora(x: Tensor) -> bool:
    """Whether the matrix's product is added to LoRA's: where memory is what LoRA's waits for."""
    return x.device.type != "cpu"


def matrix_beside_lora(
    x: Tensor, weight: Tensor, read: Read, bias: Tensor | None, low: Tensor, b: Tensor, scale: float
) -> Tensor:
    """Return W x + bias + scale B low, of which B low comes first."""
    start = low.new_empty(1) if bias is None else bias
    # What a factor of 0 is multiplied with is not read.
    output = torch.addmm(start, low, b.T, beta=float(bias is not None), alpha=scale)
    return output.addmm_(x, read(weight).T)


def _lora_beside_matrix(
    linear: Linear,
    x: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    low: Tensor,
    b: Tensor,
    scale: float,
) -> Tensor:
    """Return the same, of which W x comes first."""
    return linear(x, matrix, bias).addmm_(low, b.T, alpha=scale)


def _lora_in_matrix(
    linear: Linear,
    x: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    scale: float,
) -> Tensor:
    """Return (W + scale B A) x + bias."""
    return linear(x, torch.addmm(matrix, b, a, alpha=scale), bias)


def scaled_product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """Return scale left right: on a GPU one launch."""
    if _adds_to_lora(left):
        return torch.addmm(left.new_empty(1), left, right, beta=0, alpha=scale)
    return (left @ right).mul_(scale)


class _LoraLinear(torch.autograd.Function):
    """W x + bias + scale B A d(x), for rows x; `dropped` is d(x), or x itself if nothing drops.

    `read` gives W of the stored weight, in the backward pass again.
    """

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
        linear: Linear,
        read: Read,
    ) -> Tensor:
        ctx.scale, ctx.drops, ctx.linear, ctx.read = scale, dropped is not x, linear, read
        ctx.adds_before = not ctx.drops and linear is onednn.linear and _is_smaller(weight, x)
        sizes = len(b), x.shape[1]
        if ctx.adds_before:
            ctx.save_for_backward(x, None, weight, a, b)
            return product_once(*sizes, _lora_in_matrix, linear, x, weight, bias, a, b, scale)
        to_low = torch.nn.functional.linear if _adds_to_lora(x) else linear
        low = product_once(*a.shape, to_low, dropped, a)
        if _adds_to_lora(x):
            output = product_once(*sizes, matrix_beside_lora, x, weight, read, bias, low, b, scale)
        else:
            matrix = read(weight)
            output = product_once(
                *sizes, _lora_beside_matrix, linear, x, matrix, bias, low, b, scale
            )
        ctx.save_for_backward(dropped, low, weight, a, b)
        return output

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, d(x), A and B; W and bias are frozen."""
        dropped, low, weight, a, b = ctx.saved_tensors
        grad = outer[0]
        if ctx.adds_before:
            low = ctx.linear(dropped, a)
        if _adds_to_lora(grad):
            grad_low = scaled_product(grad, b, ctx.scale)
        else:
            grad_low = ctx.linear(grad, b.T).mul_(ctx.scale)
        grad_a, grad_b = grad_low.T @ dropped, scaled_product(grad.T, low, ctx.scale)
        grad_x = grad_dropped = None
        if ctx.needs_input_grad[0]:
            matrix = ctx.read(weight)
            if ctx.adds_before:
                matrix = torch.addmm(matrix, b, a, alpha=ctx.scale)
            if _adds_to_lora(grad) and not ctx.drops:
                grad_x = (grad_low @ a).addmm_(grad, matrix)
            else:
                grad_x = ctx.linear(grad, matrix.T)
                if ctx.drops:
                    grad_dropped = grad_low @ a
                elif not ctx.adds_before:
                    grad_x.addmm_(grad_low, a)
        return grad_x, grad_dropped, None, None, grad_a, grad_b, None, None, None


@dataclass(eq=False)
class LoraGroup:
    """Fused layers of one module that were given the same input; the first computes for all."""

    layers: Sequence[Any]
    _input: weakref.ref[Tensor] | None = None
    _waiting: dict[int, Tensor] = field(default_factory=dict)
    """outputs that were computed already, by the place of their layer"""

    def waiting(self, layer: Any, x: Tensor) -> Tensor | None:
        """Return what was computed for a layer with the first one's, of the same x."""
        if layer is self.layers[0] or self._input is None or self._input() is not x:
            return None
        return self._waiting.pop(self.layers.index(layer), None)

    def run(self, layer: Any, x: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Compute for all layers, and return the first one's output for x [..., features].

        None where `layer` is another, or each must compute alone.
        """
        if layer is not self.layers[0]:
            return None
        self._waiting.clear()
        if not layer.training or not torch.is_grad_enabled():
            return None
        if any(fused_dtype(other, x) != dtype for other in self.layers[1:]):
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
        low = product_once(*stacked.shape, torch.nn.functional.linear, x, stacked)
        ctx.save_for_backward(x, low, stacked, *weights, *bs)
        parts = low.split([b.shape[1] for b in bs], 1)
        return tuple(
            product_once(
                len(b), x.shape[1], matrix_beside_lora, x, weight, read, bias, part, b, scale
            )
            for read, weight, bias, b, part in zip(reads, weights, biases, bs, parts, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Any, ...]:
        """The gradients of x, of the stacked A and of each B; weights and biases are frozen."""
        x, low, stacked, *rest = ctx.saved_tensors
        count = len(ctx.reads)
        weights, bs = rest[:count], rest[count:]
        parts = low.split([b.shape[1] for b in bs], 1)
        products = zip(outer, bs, strict=True)
        grad_low = torch.cat([scaled_product(grad, b, ctx.scale) for grad, b in products], 1)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad_low @ stacked
            for grad, weight, read in zip(outer, weights, ctx.reads, strict=True):
                grad_x.addmm_(grad, read(weight))
        pairs = zip(outer, parts, strict=True)
        grad_bs = [scaled_product(grad.T, part, ctx.scale) for grad, part in pairs]
        return grad_x, None, None, grad_low.T @ x, *[None] * (2 * count), *grad_bs
