"""A gated MLP with LoRA on its three matrices, as one autograd function around `gate_kernel`.

The frozen products stay as they are. B of gate and up, A of down, and their gradients are computed
where the gate's kernel has their large operand anyway, instead of reading it, or adding to it, in
products of their own; the output of the gate is not saved, since the backward pass has it again.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from functools import cache, partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from app.model import fp8
from app.model.activation_checkpointing import product_once
from app.model.adapter import fused
from app.model.adapter.wrap import is_fused
from common.text import reason_of

log = logging.getLogger(__name__)

_HALF = (torch.bfloat16, torch.float16)


class _Form(NamedTuple):
    """What an MLP's function takes besides tensors."""

    kernels: ModuleType
    is_gelu: bool
    scales: tuple[float, float]
    """of gate and up, and of down"""
    dequantizes: Sequence[fused.Dequantize]
    """of gate, up and down"""
    is_fp8: bool


class GatedLora:
    """The forward of a gated MLP `module` whose gate and up are one group of fused LoRA layers."""

    def __init__(self, module: Any, activation: str, kernels: ModuleType) -> None:
        self.layers = module.gate_proj, module.up_proj, module.down_proj
        self._kernels, self._is_gelu = kernels, activation == "gelutanh"

    def __call__(self, x: Tensor) -> Tensor | None:
        """Return the output for x [..., hidden]; None if the layers must run one by one."""
        dtypes = {fused.fused_dtype(layer, x) for layer in self.layers}
        if len(dtypes) > 1 or (dtype := dtypes.pop()) not in _HALF:
            return None
        gate, up, down = self.layers
        name = gate.active_adapters[0]
        weights, dequantizes = zip(
            *(each.stored_weight(dtype) for each in self.layers), strict=True
        )
        form = _Form(
            self._kernels,
            self._is_gelu,
            (fused.scale_of(gate, name), fused.scale_of(down, name)),
            dequantizes,
            isinstance(gate, fused.FusedLoraFp8),
        )
        output: Tensor = _GatedLora.apply(
            x.to(dtype).flatten(0, -2),
            form,
            torch.cat([gate.lora_A[name].weight, up.lora_A[name].weight]).to(dtype),
            down.lora_A[name].weight.to(dtype),
            *(layer.lora_B[name].weight.to(dtype) for layer in self.layers),
            *weights,
        )
        return output.unflatten(0, x.shape[:-1])


def join_gate(module: Any, activation: str, device: torch.device) -> GatedLora | None:
    """Return the joint forward of a gated MLP, after `group_adapters`; None if it cannot have one.

    Its kernels take one rank for all three matrices, widths that are multiples of 256, and no
    biases or dropout.
    """
    layers = gate, up, down = module.gate_proj, module.up_proj, module.down_proj
    if not all(map(_can_join, layers)):
        return None
    if (kernels := _proven_kernels(device, isinstance(gate, fused.FusedLoraFp8))) is None:
        return None
    ranks = {layer.r["default"] for layer in layers}
    kinds = {type(layer) for layer in layers}
    can_join = (
        gate.group is not None
        and list(gate.group.layers) == [gate, up]
        and len(kinds) == len(ranks) == 1
        and max(ranks) <= kernels.MAX_RANK
        and not down.in_features % kernels.MULTIPLE
    )
    return GatedLora(module, activation, kernels) if can_join else None


def _can_join(layer: Any) -> bool:
    """Return whether a layer is a fused one without bias and dropout."""
    return (
        is_fused(layer)
        and layer.base_layer.bias is None
        and all(isinstance(drop, torch.nn.Identity) for drop in layer.lora_dropout.values())
    )


@cache
def _proven_kernels(device: torch.device, is_fp8: bool) -> ModuleType | None:
    """Return the kernels of a GPU; None, with a warning, if their results or gradients differ."""
    if device.type != "cuda":
        return None
    try:
        from app.model.adapter import gate_kernel

        checks = [_are_equal, _quantizes_equally] if is_fp8 else [_are_equal]
        pairs = itertools.product(checks, (False, True))
        is_equal = all(check(gate_kernel, device, is_gelu) for check, is_gelu in pairs)
        reason = "" if is_equal else "they differ"
    except Exception as error:  # noqa: BLE001  kernel compilers raise any type
        reason = reason_of(error)
    if reason:
        log.warning("kernels: adapters run beside the gates, not in one kernel (%s)", reason)
        return None
    return gate_kernel


def _are_equal(kernels: ModuleType, device: torch.device, is_gelu: bool) -> bool:
    """Compare the kernels with PyTorch's operators in fp32, on random tensors in bf16."""
    given = _probe(kernels, device)
    outer, gate, up, low, outer_low, b_gate, b_up, a_down = given
    inputs = [each.float().requires_grad_() for each in (gate, up, low, b_gate, b_up, a_down)]
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        outputs = by_operators(*inputs, is_gelu=is_gelu)
        grads = torch.autograd.grad(outputs, inputs, [outer.float(), outer_low.float()])
    found = list(kernels.forward(gate, up, low, b_gate, b_up, a_down, is_gelu=is_gelu))
    rest = kernels.backward(*given, is_gelu=is_gelu)
    transposed = [*grads[:3], grads[3].T, grads[4].T, grads[5]]
    expected = [each.detach() for each in (*outputs, *transposed)]
    return all(
        bool((one.float() - two).norm() < 0.01 * two.norm())
        for one, two in zip([*found, gate, up, *rest], expected, strict=True)
    )


def _quantizes_equally(kernels: ModuleType, device: torch.device, is_gelu: bool) -> bool:
    """Compare gradients that the kernels quantize with those that they write."""
    given = _probe(kernels, device)
    _, gate, up, *_ = given
    factors = torch.linspace(0.1, 2, 2 * gate.shape[1], device=device).chunk(2)
    *sums, values, scales = kernels.backward(*given, factors, is_gelu=is_gelu)
    expected = kernels.backward(*given, is_gelu=is_gelu)
    quantized = fp8.quantize_rows(gate, up, factors=factors)
    found, exact = (
        [*rest, fp8.dequantize(fp8.Matrix(*rows), torch.float32)]
        for *rest, rows in ([*sums, (values, scales)], [*expected, quantized])
    )
    # Values next to the middle of two may be rounded to either.
    return all(
        bool((one - two).norm() < 0.005 * two.norm()) for one, two in zip(found, exact, strict=True)
    )


def _probe(kernels: ModuleType, device: torch.device) -> list[Tensor]:
    """Return random arguments of the kernels' backward pass, in bf16."""
    random = torch.Generator(device).manual_seed(0)
    rows, width, rank = 80, kernels.MULTIPLE, 8
    shapes = [(rows, width)] * 3 + [(rows, 2 * rank), (rows, rank)]
    shapes += [(width, rank)] * 2 + [(rank, width)]
    return [torch.randn(s, generator=random, device=device).bfloat16() for s in shapes]


def by_operators(
    gate: Tensor,
    up: Tensor,
    low: Tensor,
    b_gate: Tensor,
    b_up: Tensor,
    a_down: Tensor,
    *,
    is_gelu: bool,
) -> tuple[Tensor, Tensor]:
    """Return what `gate_kernel.forward` does, by PyTorch's operators."""
    of_gate, of_up = low.split(b_gate.shape[1], 1)
    gate, up = gate + of_gate @ b_gate.T, up + of_up @ b_up.T
    functional = torch.nn.functional
    active = functional.gelu(gate, approximate="tanh") if is_gelu else functional.silu(gate)
    return active * up, (active * up) @ a_down.T


class _GatedLora(torch.autograd.Function):
    """down(f(gate(x)) * up(x)) for rows x; `stacked` are A of gate and up, one below the other."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        form: _Form,
        stacked: Tensor,
        a_down: Tensor,
        b_gate: Tensor,
        b_up: Tensor,
        b_down: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        scale, scale_down = form.scales
        *first, down = zip(weights, form.dequantizes, strict=True)
        low = product_once(*stacked.shape, fused.scaled_product, x, stacked.T, scale)
        multiply = torch.nn.functional.linear
        if form.is_fp8:  # the layers share one quantized input
            multiply = partial(_fp8_product, fp8.quantize_rows(x))
        gate, up = (multiply(x, make(weight)) for weight, make in first)
        gated, low_down = form.kernels.forward(
            gate, up, low, b_gate, b_up, a_down, is_gelu=form.is_gelu
        )
        low_down = (low_down * scale_down).to(x.dtype)
        ctx.form = form
        factors = stacked, a_down, b_gate, b_up, b_down
        ctx.save_for_backward(x, low, gate, up, low_down, *factors, *weights)
        onto = fused.matrix_onto_lora
        if form.is_fp8:
            onto = partial(fused.lora_onto_fp8, fp8.quantize_rows(gated))
        sizes = len(b_down), gated.shape[1]
        return product_once(*sizes, onto, gated, *down, None, low_down, b_down, 1.0)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, the stacked A, A of down, and each B; weights are frozen."""
        x, low, gate, up, low_down, stacked, a_down, b_gate, b_up, b_down, *weights = (
            ctx.saved_tensors
        )
        (grad,), form = outer, ctx.form
        scale, scale_down = form.scales
        *first, down = zip(weights, form.dequantizes, strict=True)
        grad_low_down = fused.scaled_product(grad, b_down, scale_down)
        grad_b_down = grad.T @ low_down
        matrix = down[1](down[0])
        grad_gated = fp8.linear(grad, matrix.T) if form.is_fp8 else grad @ matrix
        matrices = [make(weight) for weight, make in first] if form.is_fp8 else []
        factors = [each.scales for each in matrices if fp8.is_rounding()]
        # From here on, gate and up are their gradients, or those are quantized.
        given = grad_gated, gate, up, low, grad_low_down, b_gate, b_up, a_down, factors
        results = form.kernels.backward(*given, is_gelu=form.is_gelu)
        grad_low, grad_b_gate, grad_b_up, grad_a_down, *quantized = results
        grad_low = (grad_low * scale).to(x.dtype)
        grad_x = None
        if form.is_fp8 and ctx.needs_input_grad[0]:
            rows = fp8.Rows(*quantized) if quantized else None
            grad_x = fp8.input_gradient([gate, up], matrices, rows).addmm_(grad_low, stacked)
        elif ctx.needs_input_grad[0]:
            grad_x = grad_low @ stacked
            for part, (weight, make) in zip((gate, up), first, strict=True):
                grad_x.addmm_(part, make(weight))
        grad_bs = (each.T.to(x.dtype) for each in (grad_b_gate, grad_b_up))
        grads = grad_low.T @ x, grad_a_down.to(x.dtype), *grad_bs, grad_b_down
        return grad_x, None, *grads, *[None] * len(weights)


def _fp8_product(quantized: fp8.Rows, x: Tensor, matrix: fp8.Matrix) -> Tensor:
    return fp8.product(quantized, matrix, None, x.dtype)
