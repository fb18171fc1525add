"""A mixture's fused experts: their products, grouped by expert, with adapters and in 4 bits.

transformers keeps the experts of a layer in two tensors [experts, outputs, inputs] (gpt-oss:
[experts, inputs, outputs]). Tokens are sorted by expert, and each tensor is one grouped product:
no loop over experts, and the host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from transformers import PretrainedConfig

IMPLEMENTATION = "loft_grouped"
"""the name by which transformers' experts find `run_experts`"""
ALIGNED_BYTES = 16
"""bytes that a row of a grouped product's operands is a multiple of"""
PACKED = "_4bit"
"""how the name of a module ends that holds experts in 4 bits"""
Read = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to each expert's matrix W: scale B A."""

    a: Tensor
    """[experts, rank, inputs]"""
    b: Tensor
    """[experts, outputs, rank]"""
    scale: float


def has_experts(architecture: PretrainedConfig) -> bool:
    """Return whether a model is a mixture of experts, as far as its config tells."""
    numbers = architecture.get_text_config().to_dict()
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any((numbers.get(name) or 0) > 1 for name in names)


def expert_modules(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the modules of a model that hold the fused experts of a layer, with their names."""
    for name, module in model.named_modules():
        if "is_transposed" in vars(module) and "has_gate" in vars(module):
            yield name, module


class RoutingTrace(TorchDispatchMode):
    """Note what routers choose in the passes inside; with `replay`, choose as they did in others.

    Routers choose by `topk` or `argmax` of their scores, where the smallest rounding turns a tie.
    """

    def __init__(self, replay: RoutingTrace | None = None) -> None:
        super().__init__()
        self.chosen: list[Tensor] = []
        """[..., experts a token], in the order of the routers' calls"""
        self._given = None if replay is None else iter(replay.chosen)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator, and note or replace what it chooses."""
        output = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.topk.default:
            chosen = output[1]
        elif func is torch.ops.aten.argmax.default:
            chosen = output.unsqueeze(-1)
        else:
            return output
        if self._given is not None:
            chosen = next(self._given).to(chosen.device)
            dim = args[2] if len(args) > 2 else -1
            is_top = isinstance(output, tuple)
            output = (args[0].gather(dim, chosen), chosen) if is_top else chosen.squeeze(-1)
        self.chosen.append(chosen.cpu())
        return output

    def count_changed(self, others: RoutingTrace) -> tuple[int, int]:
        """Return how many choices are of other experts than there, and how many there are."""
        pairs = zip(self.chosen, others.chosen, strict=True)
        changed = [(one.sort().values != other.sort().values).any(-1) for one, other in pairs]
        return sum(int(each.sum()) for each in changed), sum(each.numel() for each in changed)


def use_grouped_experts(model: Any) -> None:
    """Let the fused experts of a model compute by `run_experts`."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if next(expert_modules(model), None) is None:
        return
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, run_experts)
    for _, module in expert_modules(model):
        module.config._experts_implementation = IMPLEMENTATION


def run_experts(self: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return what the chosen experts make of each token, weighted.

    hidden [tokens, width]; chosen and weights [tokens, experts a token]. The order of the sums is
    that of transformers' own grouped experts.
    """
    num_chosen = chosen.shape[-1]
    dtype = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    experts, order = torch.sort(chosen.reshape(-1))
    # An integer count would make the host wait for the largest number on a GPU.
    counts = torch.zeros(self.num_experts, dtype=torch.int32, device=hidden.device)
    counts.scatter_add_(0, experts, torch.ones_like(experts, dtype=torch.int32))
    ends = counts.cumsum(0, dtype=torch.int32)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)

    rows = _Spread.apply(hidden.to(dtype), order, places, num_chosen)
    first = "gate_up_proj" if self.has_gate else "up_proj"
    rows = _project(self, first, rows, experts, ends)
    rows = self._apply_gate(rows) if self.has_gate else self.act_fn(rows)
    rows = _project(self, "down_proj", rows, experts, ends)
    if vars(self).get("has_post_expert_norm"):  # transformers 5.3 has no such norms
        rows = self.post_expert_norm(rows)
    weighted = rows * weights.reshape(-1)[order].unsqueeze(-1)
    summed = weighted[places].view(len(hidden), num_chosen, -1).sum(1)
    return summed.to(hidden.dtype)


def _project(module: Any, name: str, rows: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
    """Return each row times its expert's matrix, with the adapter and the bias added."""
    dtype = rows.dtype
    stored, read = stored_experts(module, name, dtype)
    low: LowRank | None = vars(module).get("low_rank", {}).get(name)
    a = b = None
    if low is not None:
        a, b = _aligned_rank(low.a.to(dtype), low.b.to(dtype))
    output: Tensor = _GroupedLinear.apply(
        rows, ends, stored, a, b, low.scale if low else 1.0, read, module.is_transposed
    )
    bias = module._parameters.get(f"{name}_bias")
    return output if bias is None else output + bias[experts].to(dtype)


def stored_experts(module: Any, name: str, dtype: torch.dtype) -> tuple[Tensor, Read]:
    """Return the weight of experts as it is stored, and what gives their matrices in `dtype`."""
    packed = module._modules.get(packed_name(name))
    if packed is None:
        weight = module._parameters[name]
        if not weight.is_contiguous() or (weight.device.type == "cpu" and weight.data_ptr() % 16):
            return weight.to(dtype).clone(), _as_is  # a mapped file may begin anywhere
        return weight.to(dtype), _as_is
    from app.model.quantization import stored_4bit

    stored, dequantize = stored_4bit(packed)
    return stored, lambda values: dequantize(values).to(dtype)


def packed_name(name: str) -> str:
    """Return the name of the module that holds the parameter `name` of experts in 4 bits."""
    return f"{name}{PACKED}"


class PackedExperts(torch.nn.Module):
    """The weight of experts in 4 bits, beside the module that it was a parameter of."""

    quant_state: Any = None

    def __init__(self, weight: torch.nn.Parameter, shape: torch.Size, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_parameter("weight", weight)
        self.shape, self.compute_dtype = shape, dtype


def pack_experts(
    model: torch.nn.Module, pack: Callable[[torch.nn.Parameter], torch.nn.Parameter]
) -> None:
    """Let `pack` put the fused experts of a model into 4 bits, one weight at a time."""
    for _, module in expert_modules(model):
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight.ndim == 3:
                packed = PackedExperts(pack(weight), weight.shape, weight.dtype)
                del module._parameters[name]
                module.add_module(packed_name(name), packed)


def packed_shapes(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a module's parameters that are in 4 bits, by their own names."""
    return {
        name.removesuffix(PACKED): tuple(packed.shape)
        for name, packed in module._modules.items()
        if packed is not None and name.endswith(PACKED)
    }


def _as_is(weight: Tensor) -> Tensor:
    return weight


def _aligned_rank(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Pad a rank with zeros until grouped products take it."""
    missing = -a.shape[1] % (ALIGNED_BYTES // a.element_size())
    if missing:
        a = torch.nn.functional.pad(a, (0, 0, 0, missing))
        b = torch.nn.functional.pad(b, (0, missing))
    return a.contiguous(), b.contiguous()


class _Spread(torch.autograd.Function):
    """Each token's row once for every expert that it goes to, sorted by expert.

    Its gradients are added in the order of the token's choices, alike in every run; autograd's own
    scatter would sort them once more.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, order: Tensor, places: Tensor, num_chosen: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.num_chosen = num_chosen
        return hidden[order // num_chosen]

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        grad = outer[0][places]
        return grad.view(-1, ctx.num_chosen, grad.shape[-1]).sum(1), None, None, None


class _GroupedLinear(torch.autograd.Function):
    """W_e x + scale B_e A_e x for rows x that are sorted by their expert e.

    `ends` [experts] are the ends of the experts' rows; `read` gives the matrices of the stored
    weight, in the backward pass again; `by_inputs`: they are [experts, inputs, outputs].
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
        read: Read,
        by_inputs: bool,
    ) -> Tensor:
        ctx.scale, ctx.read, ctx.by_inputs = scale, read, by_inputs
        matrices = read(stored)
        output = grouped_product(x, matrices if by_inputs else matrices.mT, ends)
        low = None
        if a is not None and b is not None:
            low = grouped_product(x, a.mT, ends)
            output.add_(grouped_product(low, b.mT, ends), alpha=scale)
        ctx.save_for_backward(x, ends, stored, a, b, low)
        return output

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Any, ...]:
        """The gradients of x, of W where it trains, of A and of B."""
        x, ends, stored, a, b, low = ctx.saved_tensors
        grad = outer[0].contiguous()
        grad_x = grad_weight = grad_a = grad_b = grad_low = None
        if a is not None:
            grad_low = grouped_product(grad, b, ends).mul_(ctx.scale)
            grad_a = grouped_outer(grad_low, x, ends)
            grad_b = grouped_outer(grad, low, ends).mul_(ctx.scale)
        if ctx.needs_input_grad[0]:
            matrices = ctx.read(stored)
            grad_x = grouped_product(grad, matrices.mT if ctx.by_inputs else matrices, ends)
            if grad_low is not None:
                grad_x += grouped_product(grad_low, a, ends)
        if ctx.needs_input_grad[2]:
            pair = (x, grad) if ctx.by_inputs else (grad, x)
            grad_weight = grouped_outer(*pair, ends)
        return grad_x, None, grad_weight, grad_a, grad_b, None, None, None


def grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Return rows [rows, k] times the matrix [experts, k, n] of each row's expert."""
    if _is_aligned(rows) and _is_aligned(matrices):
        return torch.nn.functional.grouped_mm(rows, matrices, offs=ends)
    output = rows.new_zeros(len(rows), matrices.shape[2])
    for expert, part in _parts(ends):
        output[part] = rows[part] @ matrices[expert]
    return output


def grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Return left [rows, m], transposed, times right [rows, n] of each expert: [experts, m, n]."""
    if _is_aligned(left) and _is_aligned(right):
        return torch.nn.functional.grouped_mm(left.T, right, offs=ends)
    output = left.new_zeros(len(ends), left.shape[1], right.shape[1])
    for expert, part in _parts(ends):
        output[expert] = left[part].T @ right[part]
    return output


def _parts(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield the experts that have rows, and where these are; for sizes of tests, not of models."""
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = end


def _is_aligned(operand: Tensor) -> bool:
    """Return whether grouped products take an operand; they are picky on a CPU as on a GPU."""
    *_, outer, inner = operand.stride()
    long = inner if outer == 1 else outer
    return min(inner, outer) == 1 and long * operand.element_size() % ALIGNED_BYTES == 0
