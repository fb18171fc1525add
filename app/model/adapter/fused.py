"""LoRA and its frozen matrix as one autograd function: same values, fewer passes over activations.

peft computes W x and B A x, scales one and adds both, each in a new tensor of the output's size,
and the backward pass does the same. Here every sum is fused into a matrix product (`addmm`): on a
GPU into W x, on a CPU into B (A x). In fp32 on a CPU, B A is added to W first if W is smaller than
the activations.

Layers with the same input (q, k and v; gate and up) are computed together: their A are stacked, so
that the input is read once in the forward pass and once for the gradient of A, and the gradients of
the input are accumulated inside the products.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import peft
import torch
from torch import Tensor

from app.model import cpu as onednn
from app.model import fp8
from app.model.activation_checkpointing import product_once
from app.model.quantization import stored_4bit

Linear = Callable[..., Tensor]
"""computes x W^T + bias"""
Dequantize = Callable[[Tensor], Any]
"""stored weight -> matrix, as its `Linear` takes it"""


class FusedLoraLinear(peft.tuners.lora.Linear):
    """peft's layer with a fused forward while it trains one plain LoRA on a frozen matrix."""

    group: LoraGroup | None = None
    product: Linear | None = None
    """computes W x, if not as the small products of A and B"""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return W x + bias + scale B A x; any other case runs peft's own forward."""
        # Evaluation computes W x as the base does, so that losses compare exactly.
        linear = onednn.linear if self.training else torch.nn.functional.linear
        if args or kwargs or (output := _fused_output(self, x, linear, self.product)) is None:
            return super().forward(x, *args, **kwargs)
        return output

    def stored_weight(self, dtype: torch.dtype) -> tuple[Tensor, Dequantize]:
        """Return the frozen weight as stored, and the function that makes the matrix of it."""
        return self.base_layer.weight.to(dtype), lambda weight: weight


class FusedLoraFp8(FusedLoraLinear):
    """The same for a matrix in FP8."""

    group: LoraGroup | None = None
    product = staticmethod(fp8.linear)

    def stored_weight(self, dtype: torch.dtype) -> tuple[Tensor, Dequantize]:
        scales, columns = self.base_layer.scales, self.base_layer.columns
        return self.base_layer.weight, lambda weight: fp8.matrix_of(weight, scales, columns)


@cache
def lora_4bit_class() -> type[peft.tuners.lora.Linear]:
    """Return the class for a 4-bit matrix; its parent exists only if bitsandbytes is installed."""

    class FusedLora4bit(peft.tuners.lora.Linear4bit):
        """peft's layer with a fused forward while it trains one plain LoRA on a GPU.

        The matrix is dequantized once in the forward and once in the backward pass.
        """

        group: LoraGroup | None = None

        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            """Return W x + bias + scale B A x; any other case runs the forward of peft's `Linear`.

            peft's `Linear4bit` copies W x in case it were a view.
            """
            is_plain = not args and not kwargs and _is_faster_in_4_bits(self, x)
            if is_plain and (output := _fused_output(self, x)) is not None:
                return output
            plain: Tensor = peft.tuners.lora.Linear.forward(self, x, *args, **kwargs)
            return plain

        def stored_weight(self, dtype: torch.dtype) -> tuple[Tensor, Dequantize]:
            """Return the packed weight, and the function that makes the matrix of it."""
            weight, dequantize = stored_4bit(self.base_layer)
            return weight, lambda packed: dequantize(packed).to(dtype)

    return FusedLora4bit


def _is_faster_in_4_bits(layer: torch.nn.Module, x: Tensor) -> bool:
    """Return whether to run fused: for few tokens, bitsandbytes' product on packed weights wins."""
    return x.device.type != "cpu" and layer.training


def fused_dtype(layer: Any, x: Tensor) -> torch.dtype | None:
    """Return the dtype in which a layer runs fused; None if peft's own forward must run."""
    # Each attribute is read once: lookups in `nn.Module` are half of this function's time.
    active, parts = layer.active_adapters, layer._modules
    a = parts["lora_A"]._modules.get(active[0]) if len(active) == 1 else None
    if (
        a is None
        or active[0] in layer.lora_variant
        or layer.merged
        or (layer.disable_adapters and not layer.training)
        or torch.compiler.is_compiling()
        or parts["base_layer"].weight.requires_grad
    ):
        return None
    device = x.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    # With two dtypes, peft decides in which one to compute.
    return x.dtype if x.dtype == a.weight.dtype else None


def _fused_output(
    layer: Any,
    x: Tensor,
    linear: Linear = torch.nn.functional.linear,
    product: Linear | None = None,
) -> Tensor | None:
    """Return a layer's output for x [..., features]; None if peft's own forward must run.

    `product`: computes W x if not `linear`.
    """
    group: LoraGroup | None = layer.group
    if group is not None and (computed := group.take_output(layer, x)) is not None:
        return computed
    if (dtype := fused_dtype(layer, x)) is None:
        return None
    if group is not None and (joint := group.run(layer, x, dtype)) is not None:
        return joint
    name = layer.active_adapters[0]
    weight, dequantize = layer.stored_weight(dtype)
    bias = None if layer.base_layer.bias is None else layer.base_layer.bias.to(dtype)
    # Reshaped outside of the function, since some models add to a layer's output in place (Falcon).
    rows = x.to(dtype).flatten(0, -2)
    if layer.disable_adapters:
        output = _base_output(rows, dequantize(weight), bias, linear, product or linear)
        return output.unflatten(0, x.shape[:-1])
    output = _LoraLinear.apply(
        rows,
        layer.lora_dropout[name](rows),
        weight,
        bias,
        layer.lora_A[name].weight.to(dtype),
        layer.lora_B[name].weight.to(dtype),
        scale_of(layer, name),
        linear,
        product or linear,
        dequantize,
    )
    return output.unflatten(0, x.shape[:-1])


def scale_of(layer: Any, name: str) -> float:
    """Return the scale of B A; 0 without the adapter, so that W x rounds as in training."""
    scale: float = layer.scaling[name]
    return 0.0 if layer.disable_adapters else scale


def _base_output(
    x: Tensor, matrix: Any, bias: Tensor | None, linear: Linear, product: Linear
) -> Tensor:
    """Return W x + bias, rounded as `_LoraLinear` does while B is 0: by the same product of W."""
    if not lora_comes_first(x) or product is not linear:
        return product(x, matrix, bias)
    shape = len(x), len(matrix)
    start = x.new_zeros(shape) if bias is None else bias.expand(shape).clone()
    return start.addmm_(x, matrix.T)


def lora_comes_first(x: Tensor) -> bool:
    """Return whether W x is added to the small product B low, not the other way round.

    Faster on a GPU, where B low is bound by memory bandwidth.
    """
    return x.device.type != "cpu"


def matrix_onto_lora(
    x: Tensor,
    weight: Tensor,
    dequantize: Dequantize,
    bias: Tensor | None,
    low: Tensor,
    b: Tensor,
    scale: float,
) -> Tensor:
    """Return W x + bias + scale B low; W x is added to the rest."""
    start = low.new_empty(1) if bias is None else bias
    # With beta = 0, addmm does not read its first argument.
    output = torch.addmm(start, low, b.T, beta=float(bias is not None), alpha=scale)
    return output.addmm_(x, dequantize(weight).T)


def lora_onto_fp8(
    quantized: fp8.Rows,
    x: Tensor,
    weight: Tensor,
    dequantize: Dequantize,
    bias: Tensor | None,
    low: Tensor,
    b: Tensor,
    scale: float,
) -> Tensor:
    """Return W x + bias + scale B low, for x that is already quantized."""
    output = fp8.product(quantized, dequantize(weight), bias, x.dtype)
    return output.addmm_(low, b.T, alpha=scale)


def scaled_product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """Return scale left right, on a GPU by one kernel launch."""
    if lora_comes_first(left):
        return torch.addmm(left.new_empty(1), left, right, beta=0, alpha=scale)
    return (left @ right).mul_(scale)


class _LoraLinear(torch.autograd.Function):
    """W x + bias + scale B A d(x), for rows x; `dropped` is d(x), or x itself without dropout.

    Forward and backward pass each call `dequantize`: W is not saved.
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
        product: Linear,
        dequantize: Dequantize,
    ) -> Tensor:
        ctx.scale, ctx.linear, ctx.product, ctx.dequantize = scale, linear, product, dequantize
        ctx.drops = dropped is not x
        is_smaller = onednn.multiplies_faster(x) and len(x) >= max(weight.shape)
        ctx.is_merged = not ctx.drops and product is onednn.linear and is_smaller
        sizes = len(b), x.shape[1]
        if ctx.is_merged:
            ctx.save_for_backward(x, None, weight, a, b)
            # (W + scale B A) x + bias
            return product_once(
                *sizes, lambda: linear(x, torch.addmm(weight, b, a, alpha=scale), bias)
            )
        if lora_comes_first(x) and product is linear:
            low = product_once(*a.shape, torch.nn.functional.linear, dropped, a)
            output = product_once(
                *sizes, matrix_onto_lora, x, weight, dequantize, bias, low, b, scale
            )
        else:
            low = product_once(*a.shape, linear, dropped, a)
            matrix = dequantize(weight)
            output = product_once(
                *sizes, lambda: product(x, matrix, bias).addmm_(low, b.T, alpha=scale)
            )
        ctx.save_for_backward(dropped, low, weight, a, b)
        return output

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, d(x), A and B; W and bias are frozen."""
        dropped, low, weight, a, b = ctx.saved_tensors
        grad = outer[0]
        if ctx.is_merged:
            low = ctx.linear(dropped, a)
        if lora_comes_first(grad):
            grad_low = scaled_product(grad, b, ctx.scale)
        else:
            grad_low = ctx.linear(grad, b.T).mul_(ctx.scale)
        grad_a, grad_b = grad_low.T @ dropped, scaled_product(grad.T, low, ctx.scale)
        grad_x = grad_dropped = None
        if ctx.needs_input_grad[0]:
            matrix = ctx.dequantize(weight)
            if ctx.is_merged:
                matrix = torch.addmm(matrix, b, a, alpha=ctx.scale)
            if lora_comes_first(grad) and not ctx.drops and ctx.product is ctx.linear:
                grad_x = (grad_low @ a).addmm_(grad, matrix)
            else:
                grad_x = ctx.product(grad, matrix.T)
                if ctx.drops:
                    grad_dropped = grad_low @ a
                elif not ctx.is_merged:
                    grad_x.addmm_(grad_low, a)
        return grad_x, grad_dropped, None, None, grad_a, grad_b, None, None, None, None


@dataclass(eq=False)
class LoraGroup:
    """Fused layers of one module that read the same input; the first layer computes all outputs."""

    layers: Sequence[Any]
    _input: weakref.ref[Tensor] | None = None
    _outputs: dict[int, Tensor] = field(default_factory=dict)
    """computed outputs that their layer has not taken yet, by index of the layer"""

    def take_output(self, layer: Any, x: Tensor) -> Tensor | None:
        """Return the output that the first layer's call computed for another layer, if any."""
        if layer is self.layers[0] or self._input is None or self._input() is not x:
            return None
        return self._outputs.pop(self.layers.index(layer), None)

    def drop_outputs(self) -> None:
        """Release the outputs that no layer has taken, and with them the graph of their forward."""
        self._input = None
        self._outputs.clear()

    def run(self, layer: Any, x: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Compute all layers, and return the first one's output for x [..., features].

        None if `layer` is not the first, or the layers must run one by one.
        """
        if layer is not self.layers[0]:
            return None
        self._outputs.clear()
        if not layer.training or not torch.is_grad_enabled():
            return None
        if any(fused_dtype(other, x) != dtype for other in self.layers[1:]):
            return None
        first, *others = self._compute(x, dtype)
        self._input, self._outputs = weakref.ref(x), dict(enumerate(others, 1))
        return first

    def _compute(self, x: Tensor, dtype: torch.dtype) -> list[Tensor]:
        name = self.layers[0].active_adapters[0]
        stored = [layer.stored_weight(dtype) for layer in self.layers]
        weights, dequantizes = zip(*stored, strict=True)
        biases = [layer.base_layer.bias for layer in self.layers]
        is_fp8 = isinstance(self.layers[0], FusedLoraFp8)
        outputs = _GroupedLoraLinear.apply(
            x.to(dtype).flatten(0, -2),
            scale_of(self.layers[0], name),
            is_fp8,
            dequantizes,
            torch.cat([layer.lora_A[name].weight for layer in self.layers]).to(dtype),
            *weights,
            *(None if bias is None else bias.to(dtype) for bias in biases),
            *(layer.lora_B[name].weight.to(dtype) for layer in self.layers),
        )
        return [output.unflatten(0, x.shape[:-1]) for output in outputs]


class _GroupedLoraLinear(torch.autograd.Function):
    """W_i x + bias_i + scale B_i A_i x for all i; `stacked` are the A_i, one below the other."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: float,
        is_fp8: bool,
        dequantizes: Sequence[Dequantize],
        stacked: Tensor,
        *rest: Any,
    ) -> tuple[Tensor, ...]:
        count = len(dequantizes)
        weights, biases, bs = rest[:count], rest[count : 2 * count], rest[2 * count :]
        ctx.scale, ctx.is_fp8, ctx.dequantizes = scale, is_fp8, dequantizes
        low = product_once(*stacked.shape, torch.nn.functional.linear, x, stacked)
        ctx.save_for_backward(x, low, stacked, *weights, *bs)
        lows = low.split([b.shape[1] for b in bs], 1)
        each = zip(weights, dequantizes, biases, lows, bs, strict=True)
        onto = matrix_onto_lora
        if is_fp8:  # the layers share one quantized input
            onto = partial(lora_onto_fp8, fp8.quantize_rows(x))
        return tuple(
            product_once(len(b), x.shape[1], onto, x, *arguments, b, scale)
            for *arguments, b in each
        )

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Any, ...]:
        """Return the gradients of x, the stacked A and each B; weights and biases are frozen."""
        x, low, stacked, *rest = ctx.saved_tensors
        count = len(ctx.dequantizes)
        weights, bs = rest[:count], rest[count:]
        lows = low.split([b.shape[1] for b in bs], 1)
        grad_lows = [scaled_product(grad, b, ctx.scale) for grad, b in zip(outer, bs, strict=True)]
        grad_low = torch.cat(grad_lows, 1)
        grad_x = None
        if ctx.needs_input_grad[0]:
            matrices = (make(weight) for make, weight in zip(ctx.dequantizes, weights, strict=True))
            if ctx.is_fp8:
                grad_x = fp8.input_gradient(outer, list(matrices)).addmm_(grad_low, stacked)
            else:
                grad_x = grad_low @ stacked
                for grad, matrix in zip(outer, matrices, strict=True):
                    grad_x.addmm_(grad, matrix)
        pairs = zip(outer, lows, strict=True)
        grad_bs = [scaled_product(grad.T, low, ctx.scale) for grad, low in pairs]
        return grad_x, None, None, None, grad_low.T @ x, *[None] * (2 * count), *grad_bs
