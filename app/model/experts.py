"""Grouped matrix products for the fused experts of a mixture of experts, with LoRA and 4 bits.

transformers stores the experts of a layer in two tensors [experts, outputs, inputs] (gpt-oss:
[experts, inputs, outputs]). Tokens are sorted by expert, so that each tensor takes one grouped
product: no loop over experts, and no synchronization of the host with the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from app.model.architecture import num_experts

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_IMPLEMENTATION = "loft_grouped"
"""name under which `_run_experts` is registered with transformers"""
_ALIGNED_BYTES = 16
"""alignment that grouped products require for the rows of their operands, in bytes"""
_PACKED = "_4bit"
"""suffix of the name of a module that holds 4-bit experts"""
_Unpack = Callable[[Tensor], Tensor]
_Read = Callable[[Any], tuple[Tensor, _Unpack]]
Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""returns the outputs of experts for rows that are sorted by expert; given the expert of each row,
and the index after the last row of each expert"""


@dataclass(frozen=True, slots=True)
class LowRank:
    """The low-rank update of each expert's matrix W: W + scale B A."""

    a: Tensor
    """[experts, rank, inputs]"""
    b: Tensor
    """[experts, outputs, rank]"""
    scale: float


def has_experts(architecture: PretrainedConfig) -> bool:
    """Return whether a model's config declares more than one expert."""
    return num_experts(architecture.get_text_config().to_dict()) > 1


def expert_modules(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the name and module of each layer's fused experts."""
    for name, module in model.named_modules():
        if "is_transposed" in vars(module) and "has_gate" in vars(module):
            yield name, module


class RoutingTrace(TorchDispatchMode):
    """Record the experts that routers choose; with `replay`, force the choices of that trace.

    Routers choose by `topk` or `argmax` of their scores, so that a rounding difference may change
    which expert is chosen.
    """

    def __init__(self, replay: RoutingTrace | None = None) -> None:
        super().__init__()
        self.chosen: list[Tensor] = []
        """chosen experts [..., experts per token], one tensor per router call"""
        self._replayed = None if replay is None else iter(replay.chosen)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator; record or replace its result if it is a choice of experts."""
        output = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.topk.default:
            chosen = output[1]
        elif func is torch.ops.aten.argmax.default:
            chosen = output.unsqueeze(-1)
        else:
            return output
        if self._replayed is not None:
            chosen = next(self._replayed).to(chosen.device)
            dim = args[2] if len(args) > 2 else -1
            is_top = isinstance(output, tuple)
            output = (args[0].gather(dim, chosen), chosen) if is_top else chosen.squeeze(-1)
        self.chosen.append(chosen.cpu())
        return output

    def count_changed(self, other: RoutingTrace) -> tuple[int, int]:
        """Return the number of choices that differ from those of `other`, and of all choices."""
        pairs = zip(self.chosen, other.chosen, strict=True)
        changed = [(own.sort().values != its.sort().values).any(-1) for own, its in pairs]
        return sum(int(each.sum()) for each in changed), sum(each.numel() for each in changed)


def use_grouped_experts(model: Any) -> None:
    """Make the fused experts of a model compute with `_run_experts`."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if next(expert_modules(model), None) is None:
        return
    ALL_EXPERTS_FUNCTIONS.register(_IMPLEMENTATION, _run_experts)
    for _, module in expert_modules(model):
        module.config._experts_implementation = _IMPLEMENTATION


def _run_experts(self: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the outputs of each token's experts, [tokens, width].

    hidden [tokens, width]; chosen and weights [tokens, experts per token]. Sums in the order of
    transformers' own grouped experts. If the module has an `exchange`, other ranks hold some of its
    experts, and it is called as `exchange(rows, counts, compute)`.
    """
    num_chosen = chosen.shape[-1]
    dtype = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    experts, order = torch.sort(chosen.reshape(-1))
    # Not `bincount`: it would make the host wait for the GPU to know the largest index.
    counts = torch.zeros(self.num_experts, dtype=torch.int32, device=hidden.device)
    counts.scatter_add_(0, experts, torch.ones_like(experts, dtype=torch.int32))
    positions = torch.empty_like(order)
    positions[order] = torch.arange(len(order), device=order.device)

    rows = repeat_rows(hidden.to(dtype), order, positions, num_chosen)
    if (exchange := vars(self).get("exchange")) is None:
        rows = _compute(self, rows, experts, counts.cumsum(0, dtype=torch.int32))
    else:
        rows = exchange(rows, counts, partial(_compute, self))
    weighted = rows * weights.reshape(-1)[order].unsqueeze(-1)
    summed = weighted[positions].view(len(hidden), num_chosen, -1).sum(1)
    return summed.to(hidden.dtype)


def _compute(module: Any, rows: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
    """Return the outputs of a module's experts; see `Compute`."""
    first = "gate_up_proj" if module.has_gate else "up_proj"
    rows = _project(module, first, rows, experts, ends)
    rows = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
    rows = _project(module, "down_proj", rows, experts, ends)
    if vars(module).get("has_post_expert_norm"):  # the attribute is missing in transformers 5.3
        rows = module.post_expert_norm(rows)
    return rows


def _project(module: Any, name: str, rows: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
    """Return each row times its expert's matrix, plus adapter and bias."""
    dtype = rows.dtype
    stored, dequantize = _stored_experts(module, name, dtype)
    low: LowRank | None = vars(module).get("low_rank", {}).get(name)
    a = b = None
    if low is not None:
        a, b = low.a.to(dtype), low.b.to(dtype)
        # The rank is padded with zeros to the alignment of grouped products.
        if missing := -a.shape[1] % (_ALIGNED_BYTES // a.element_size()):
            a = torch.nn.functional.pad(a, (0, 0, 0, missing))
            b = torch.nn.functional.pad(b, (0, missing))
        a, b = a.contiguous(), b.contiguous()
    output: Tensor = _GroupedLinear.apply(
        rows, ends, stored, a, b, low.scale if low else 1.0, dequantize, module.is_transposed
    )
    bias = module._parameters.get(f"{name}_bias")
    return output if bias is None else output + bias[experts].to(dtype)


def _stored_experts(module: Any, name: str, dtype: torch.dtype) -> tuple[Tensor, _Unpack]:
    """Return the stored weight of the experts, and a function from it to matrices in `dtype`."""
    if (packed := module._modules.get(packed_name(name))) is not None:
        stored, unpack = packed.read(packed)
        return stored, lambda values: unpack(values).to(dtype)
    weight = module._parameters[name]
    stored = weight.to(dtype)
    if not weight.is_contiguous() or (weight.device.type == "cpu" and weight.data_ptr() % 16):
        stored = stored.clone()  # tensors in a memory-mapped file may be unaligned
    return stored, _identity


def _identity(stored: Tensor) -> Tensor:
    return stored


def packed_name(name: str) -> str:
    """Return the name of the module that holds the 4-bit form of the experts' parameter `name`."""
    return f"{name}{_PACKED}"


class PackedExperts(torch.nn.Module):
    """A 4-bit weight of experts; a child of the module whose parameter it replaces."""

    quant_state: Any = None

    def __init__(
        self, weight: torch.nn.Parameter, shape: torch.Size, dtype: torch.dtype, read: _Read
    ) -> None:
        super().__init__()
        self.register_parameter("weight", weight)
        self.shape, self.compute_dtype, self.read = shape, dtype, read


def pack_experts(
    model: torch.nn.Module, pack: Callable[[torch.nn.Parameter], torch.nn.Parameter], read: _Read
) -> None:
    """Quantize the fused experts of a model to 4 bits by `pack`, one weight at a time.

    `read` returns the stored weight of a packed module, and a function from it to the matrices.
    """
    for _, module in expert_modules(model):
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight.ndim == 3:
                packed = PackedExperts(pack(weight), weight.shape, weight.dtype, read)
                del module._parameters[name]
                module.add_module(packed_name(name), packed)


def packed_shapes(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the unpacked shapes of a module's 4-bit parameters, by parameter name."""
    return {
        name.removesuffix(_PACKED): tuple(packed.shape)
        for name, packed in module._modules.items()
        if packed is not None and name.endswith(_PACKED)
    }


def repeat_rows(rows: Tensor, order: Tensor, positions: Tensor, times: int = 1) -> Tensor:
    """Return the rows, each repeated `times`, in `order`, whose inverse is `positions`."""
    repeated: Tensor = _RepeatRows.apply(rows, order, positions, times)
    return repeated


class _RepeatRows(torch.autograd.Function):
    """Repeat each token's row once per chosen expert, sorted by expert.

    The backward pass adds a token's gradients in the order of its choices, which is deterministic;
    autograd's scatter would sort them again.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, order: Tensor, positions: Tensor, num_chosen: int
    ) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.num_chosen = num_chosen
        return hidden[order // num_chosen]

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        (positions,) = ctx.saved_tensors
        grad = outer[0][positions]
        return grad.view(-1, ctx.num_chosen, grad.shape[-1]).sum(1), None, None, None


class _GroupedLinear(torch.autograd.Function):
    """W_e x + scale B_e A_e x for rows x that are sorted by their expert e.

    `ends` [experts]: index after the last row of each expert; `dequantize`: computes the matrices
    from the stored weight, once in the forward and again in the backward pass; `is_transposed`: the
    matrices are [experts, inputs, outputs].
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        ends: Tensor,
        stored: Tensor,
        a: Tensor | None,
        b: Tensor | None,
        scale: float,
        dequantize: _Unpack,
        is_transposed: bool,
    ) -> Tensor:
        ctx.scale, ctx.dequantize, ctx.is_transposed = scale, dequantize, is_transposed
        matrices = dequantize(stored)
        output = _grouped_product(x, matrices if is_transposed else matrices.mT, ends)
        low = None
        if a is not None and b is not None:
            low = _grouped_product(x, a.mT, ends)
            output.add_(_grouped_product(low, b.mT, ends), alpha=scale)
        ctx.save_for_backward(x, ends, stored, a, b, low)
        return output

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Any, ...]:
        """Return the gradients of x, of W if it is trained, of A and of B."""
        x, ends, stored, a, b, low = ctx.saved_tensors
        grad = outer[0].contiguous()
        grad_x = grad_weight = grad_a = grad_b = grad_low = None
        if a is not None:
            grad_low = _grouped_product(grad, b, ends).mul_(ctx.scale)
            grad_a = _grouped_outer(grad_low, x, ends)
            grad_b = _grouped_outer(grad, low, ends).mul_(ctx.scale)
        if ctx.needs_input_grad[0]:
            matrices = ctx.dequantize(stored)
            grad_x = _grouped_product(grad, matrices.mT if ctx.is_transposed else matrices, ends)
            if grad_low is not None:
                grad_x += _grouped_product(grad_low, a, ends)
        if ctx.needs_input_grad[2]:
            pair = (x, grad) if ctx.is_transposed else (grad, x)
            grad_weight = _grouped_outer(*pair, ends)
        return grad_x, None, grad_weight, grad_a, grad_b, None, None, None


def _grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Return rows [rows, k] times the matrix [experts, k, n] of each row's expert."""
    if len(rows) and _is_aligned(rows) and _is_aligned(matrices):
        return torch.nn.functional.grouped_mm(rows, matrices, offs=ends)
    output = rows.new_zeros(len(rows), matrices.shape[2])
    for expert, part in _rows_by_expert(ends):
        output[part] = rows[part] @ matrices[expert]
    return output


def _grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Return left.T [m, rows] times right [rows, n] of each expert's rows: [experts, m, n]."""
    if len(left) and _is_aligned(left) and _is_aligned(right):
        return torch.nn.functional.grouped_mm(left.T, right, offs=ends)
    output = left.new_zeros(len(ends), left.shape[1], right.shape[1])
    for expert, part in _rows_by_expert(ends):
        output[expert] = left[part].T @ right[part]
    return output


def _rows_by_expert(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield each expert that has rows, and their slice; slow, for unaligned sizes (tests)."""
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = end


def _is_aligned(operand: Tensor) -> bool:
    """Return whether `grouped_mm` accepts the strides of an operand, on a CPU or a GPU."""
    *_, outer, inner = operand.stride()
    long = inner if outer == 1 else outer
    return min(inner, outer) == 1 and long * operand.element_size() % _ALIGNED_BYTES == 0
