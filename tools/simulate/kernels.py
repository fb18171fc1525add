"""Replacements of the Triton kernels of Liger, and of our own, for FakeTensors.

They read, write and save the same tensors, under the same names, and compute nothing. FakeTensors
cannot see what a Triton kernel reads and writes, and Triton needs a GPU.
"""

from __future__ import annotations

import functools
import importlib.machinery
import sys
import types
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

GATE_CHUNK, GATE_SUMS, GATE_ROWS = 2048, 4096, 1024
"""sizes of a program in `app.model.adapter.gate_kernel`, which needs Triton"""


@custom_op("standin::rms_norm", mutates_args=())
def rms_norm(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hidden), hidden.new_empty(hidden.shape[:-1], dtype=torch.float32)


@custom_op("standin::rms_norm_backward", mutates_args=())
def rms_norm_backward(grad: Tensor, hidden: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    return torch.empty_like(hidden)


@custom_op("standin::add_rms_norm", mutates_args=())
def add_rms_norm(hidden: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scales = hidden.new_empty(hidden.shape[:-1], dtype=torch.float32)
    return torch.empty_like(hidden), torch.empty_like(hidden), scales


@custom_op("standin::add_rms_norm_backward", mutates_args=())
def add_rms_norm_backward(
    grad: Tensor, of_sum: Tensor, total: Tensor, weight: Tensor, scales: Tensor
) -> Tensor:
    return torch.empty_like(total)


@custom_op("standin::gate", mutates_args=())
def gate(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(gate)


@custom_op("standin::gate_backward", mutates_args={"gate", "up"})
def gate_backward(grad: Tensor, gate: Tensor, up: Tensor) -> None:
    """Gradients overwrite the inputs."""


@custom_op("standin::lora_gate", mutates_args=())
def lora_gate(
    gate: Tensor, up: Tensor, low: Tensor, b_gate: Tensor, b_up: Tensor, a_down: Tensor
) -> tuple[Tensor, Tensor]:
    chunks = -(-gate.shape[1] // GATE_CHUNK)
    sums = gate.new_empty(chunks, len(gate), len(a_down), dtype=torch.float32)
    return torch.empty_like(gate), sums


@custom_op("standin::lora_gate_backward", mutates_args={"gate", "up"})
def lora_gate_backward(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    low: Tensor,
    grad_low_down: Tensor,
    b_gate: Tensor,
    b_up: Tensor,
    a_down: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return sums by tile; gradients overwrite gate and up."""
    (rows, width), rank = gate.shape, len(a_down)
    tiles, chunks = width * max(rank, 16) // GATE_SUMS, -(-rows // GATE_ROWS)
    low_sums = gate.new_empty(tiles, rows, 2 * rank)
    return low_sums, gate.new_empty(3, chunks, rank, width, dtype=torch.float32)


@custom_op("standin::lora_gate_maxima", mutates_args=())
def lora_gate_maxima(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    low: Tensor,
    grad_low_down: Tensor,
    b_gate: Tensor,
    b_up: Tensor,
    a_down: Tensor,
    factors: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return sums by tile, and the largest value of each row by tile."""
    low_sums, sums = lora_gate_backward._init_fn(
        grad, gate, up, low, grad_low_down, b_gate, b_up, a_down
    )
    return low_sums, sums, sums.new_empty(len(low_sums), len(gate))


@custom_op("standin::lora_gate_quantized", mutates_args=())
def lora_gate_quantized(given: list[Tensor]) -> Tensor:
    """Return quantized gradients of gate and up side by side, from the same tensors."""
    rows, width = given[1].shape
    return given[1].new_empty(rows, 2 * width, dtype=torch.float8_e4m3fn)


@custom_op("standin::rope", mutates_args=())
def rope(query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    new_query, new_key = (torch.empty_like(part.transpose(1, 2)) for part in (query, key))
    return new_query.transpose(1, 2), new_key.transpose(1, 2)


@custom_op("standin::cross_entropy", mutates_args={"losses"})
def cross_entropy(logits: Tensor, labels: Tensor, losses: Tensor) -> None:
    """Reads the logits once."""


@custom_op("standin::cross_entropy_gradient", mutates_args={"logits"})
def cross_entropy_gradient(logits: Tensor, labels: Tensor) -> None:
    """Reads the logits once more and overwrites them with their gradients."""


@custom_op("standin::quantize_rows", mutates_args=())
def quantize_rows(parts: list[Tensor], factors: list[Tensor]) -> tuple[Tensor, Tensor]:
    rows, width = parts[0], sum(part.shape[1] for part in parts)
    values = rows.new_empty(len(rows), width, dtype=torch.float8_e4m3fn)
    return values, rows.new_empty(len(rows), dtype=torch.float32)


@custom_op("standin::quantize_columns", mutates_args=())
def quantize_columns(first: Tensor, second: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Read the same tensor twice: its columns together are larger than a GPU's cache."""
    values = first.new_empty(first.shape[1], length, dtype=torch.float8_e4m3fn)
    return values, first.new_empty(first.shape[1], dtype=torch.float32)


@custom_op("standin::adamw8bit", mutates_args={"weight", "state1", "state2"})
def adamw8bit(weight: Tensor, grad: Tensor, state1: Tensor, state2: Tensor) -> None:
    """Reads weight, gradient and moments once, and overwrites all but the gradient."""


for _operator in (
    rms_norm, rms_norm_backward, add_rms_norm, add_rms_norm_backward, gate, rope, lora_gate,
    lora_gate_backward, lora_gate_maxima, lora_gate_quantized, quantize_rows, quantize_columns,
):  # fmt: skip
    _operator.register_fake(_operator._init_fn)
for _operator in (gate_backward, cross_entropy, cross_entropy_gradient, adamw8bit):
    _operator.register_fake(lambda *_: None)


class RmsNorm(torch.autograd.Function):
    """Saves its input and one scale per token."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        normed, scales = torch.ops.standin.rms_norm(hidden, weight)
        ctx.save_for_backward(hidden, weight, scales)
        return normed

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, scales = ctx.saved_tensors
        grad = torch.ops.standin.rms_norm_backward(outer[0], hidden, weight, scales)
        return grad, torch.empty_like(weight) if ctx.needs_input_grad[1] else None


class AddRmsNorm(torch.autograd.Function):
    """Saves the sum and one scale per token; both inputs have the same gradient."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, residual: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        normed, total, scales = torch.ops.standin.add_rms_norm(hidden, residual, weight)
        ctx.save_for_backward(total, weight, scales)
        return normed, total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        total, weight, scales = ctx.saved_tensors
        grad = torch.ops.standin.add_rms_norm_backward(*outer, total, weight, scales)
        return grad, grad, torch.empty_like(weight) if ctx.needs_input_grad[2] else None


class Gate(torch.autograd.Function):
    """Saves both inputs, and overwrites them with their gradients."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        gated: Tensor = torch.ops.standin.gate(gate, up)
        return gated

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = (tensor.detach() for tensor in ctx.saved_tensors)
        torch.ops.standin.gate_backward(outer[0], gate, up)
        return gate, up


class Rope(torch.autograd.Function):
    """Saves only the angles."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cosine, sine)
        rotated: tuple[Tensor, Tensor] = torch.ops.standin.rope(query, key, cosine, sine)
        return rotated

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        return *torch.ops.standin.rope(*outer, *ctx.saved_tensors), None, None


def liger_rms_norm(hidden: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
    normed: Tensor = RmsNorm.apply(hidden, weight)
    return normed


def liger_fused_add_rms_norm(
    hidden: Tensor, residual: Tensor, weight: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor]:
    both: tuple[Tensor, Tensor] = AddRmsNorm.apply(hidden, residual, weight)
    return both


def liger_swiglu(gate: Tensor, up: Tensor, *_: Any, **__: Any) -> Tensor:
    gated: Tensor = Gate.apply(gate, up)
    return gated


def liger_geglu(gate: Tensor, up: Tensor, *_: Any, **__: Any) -> Tensor:
    return liger_swiglu(gate, up)


def rotate(query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    rotated: tuple[Tensor, Tensor] = Rope.apply(query, key, cosine, sine)
    return rotated


def cross_entropy_(
    logits: Tensor, labels: Tensor, losses: Tensor, softcap: float | None, *, writes_gradient: bool
) -> None:
    torch.ops.standin.cross_entropy(logits, labels, losses)
    if writes_gradient:
        torch.ops.standin.cross_entropy_gradient(logits, labels)


def forward_gate(*tensors: Tensor, is_gelu: bool) -> tuple[Tensor, Tensor]:
    gated, sums = torch.ops.standin.lora_gate(*tensors)
    return gated, sums.sum(0)


def backward_gate(*tensors: Any, is_gelu: bool) -> tuple[Tensor, ...]:
    given, factors = tensors[:8], list(*tensors[8:])
    if not factors:
        low_sums, sums = torch.ops.standin.lora_gate_backward(*given)
        return low_sums.sum(0), *sums.sum(1)
    from app.model.fp8 import LARGEST, SMALLEST

    low_sums, sums, maxima = torch.ops.standin.lora_gate_maxima(*given, factors)
    scales = maxima.amax(0).clamp_min_(SMALLEST) / LARGEST
    values = torch.ops.standin.lora_gate_quantized([*given, *factors, scales])
    return low_sums.sum(0), *sums.sum(1), values, scales


@functools.cache
def install_kernels() -> None:
    """Install these functions as the modules of Liger's kernels and of our own."""
    loss: Any = types.ModuleType("app.model.loss_kernel")
    loss.cross_entropy_ = cross_entropy_
    fp8: Any = types.ModuleType("app.model.fp8_kernel")
    fp8.quantize_rows = lambda parts, factors, **_: quantize_rows(list(parts), list(factors))
    fp8.quantize_columns = lambda tensor, length, **_: quantize_columns(tensor, tensor, length)
    gates: Any = types.ModuleType("app.model.adapter.gate_kernel")
    gates.MAX_RANK, gates.MULTIPLE = 64, 256
    gates.forward, gates.backward = forward_gate, backward_gate
    step: Any = types.ModuleType("app.training.eight_bit_kernel")
    step.step = lambda weight, grad, state, *_: adamw8bit(
        weight.detach(), grad, state["state1"], state["state2"]
    )
    ropes: Any = types.ModuleType("app.model.rope_kernel")
    ropes.rotate = rotate
    sys.modules.update({module.__name__: module for module in (loss, fp8, gates, ropes, step)})
    _install_flash4()
    for name in ("", ".transformers", ".transformers.functional"):
        module = types.ModuleType(f"liger_kernel{name}")
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None, is_package=True)
        module.__path__ = []
        sys.modules[module.__name__] = module
    functional: Any = sys.modules["liger_kernel.transformers.functional"]
    functional.liger_rms_norm = liger_rms_norm
    functional.liger_fused_add_rms_norm = liger_fused_add_rms_norm
    functional.liger_swiglu, functional.liger_geglu = liger_swiglu, liger_geglu


class Flash4:
    """The handle of FlashAttention 4 that PyTorch holds while it is active."""

    def remove(self) -> None:
        """Do nothing: no kernel was registered."""


def _install_flash4() -> None:
    """Let the program find the package of FlashAttention 4, and PyTorch activate it."""
    from torch.nn.attention import register_flash_attention_impl

    from app.model.attention import backends

    version = backends.package_version
    backends.package_version = lambda package: (
        "4.0.0b16" if package == backends.FLASH4 else version(package)
    )
    register_flash_attention_impl("FA4", register_fn=Flash4)
