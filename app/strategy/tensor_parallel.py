"""Tensor parallelism: ranks that compute parts of the same matrices on the same data (1909.08053).

A layer's first matrices are cut by rows (each rank computes some of the heads, or of the inner
features), its last ones by columns (each adds its part to the output). Embedding, norms and head
are whole on every rank. Two operations stand between: `copied` in front of the cut matrices, whose
gradients are parts of a sum, and `summed` behind them, whose outputs are. An adapter is cut with
its matrix: of a LoRA the small side, which both see, stays whole.

What is cut are plain tensors, so that FSDP2 may share them out again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from app.model.adapter import unfuse_adapters
from app.process.errors import UserError

BY_ROWS, BY_COLUMNS, ON_PARTS = "colwise", "rowwise", "replicated_with_grad_allreduce"
"""kinds of transformers' plans, by the side of x W that is cut: here W is kept transposed"""


@dataclass(frozen=True, slots=True)
class Cut:
    """A weight that was cut: which, and along which dimension."""

    module: torch.nn.Module
    name: str
    dim: int


class TensorParallel:
    """Cuts the layers of one model over the ranks of `group`."""

    def __init__(self, model: Any, group: Any, names: Sequence[str]) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self.cuts: list[Cut] = []
        self.on_parts: list[torch.nn.Module] = []
        """modules whole on every rank whose gradients are parts of a sum, as norms of heads"""
        self._kinds = _kinds_by_path(model)
        self._check(model, [model.get_submodule(name) for name in names])
        unfuse_adapters(model)

    def cut(self, layer: torch.nn.Module) -> None:
        """Leave of a layer's matrices, which are whole, what this rank computes with."""
        for path, kind in self._kinds.items():
            module: Any = layer.get_submodule(path)
            if kind == ON_PARTS:
                self.on_parts.append(module)
            elif kind == BY_ROWS:
                self._cut_rows(module)
            else:
                self._cut_columns(module)

    def _cut_rows(self, module: Any) -> None:
        linear = _matrix(module)
        self._keep(linear, "weight", 0)
        self._keep(linear, "bias", 0)
        linear.register_forward_pre_hook(self._copy_input)
        for part, tensors in _adapter_parts(module):
            if part == "lora_A":
                tensors.register_forward_hook(self._copy_output)
            elif part == "lora_B":
                self._keep(tensors, "weight", 0)
            elif part == "ia3_l" and not module.is_feedforward:
                self._keep(tensors, "default", 0)

    def _cut_columns(self, module: Any) -> None:
        linear = _matrix(module)
        self._keep(linear, "weight", 1)
        linear.forward = _SummedLinear(linear, self.group)
        for part, tensors in _adapter_parts(module):
            if part == "lora_A":
                self._keep(tensors, "weight", 1)
                tensors.register_forward_hook(self._sum_output)
            elif part == "ia3_l" and module.is_feedforward:
                self._keep(tensors, "default", 1)

    def _keep(self, module: Any, name: str, dim: int) -> None:
        weight = module._parameters[name]
        if weight is None:
            return
        part = weight.detach().chunk(self.size, dim)[self.rank].contiguous().clone()
        module._parameters[name] = torch.nn.Parameter(part, requires_grad=weight.requires_grad)
        self.cuts.append(Cut(module, name, dim))

    def _copy_input(self, module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (copied(inputs[0], self.group), *inputs[1:])

    def _copy_output(self, module: Any, inputs: Any, output: Tensor) -> Tensor:
        return copied(output, self.group)

    def _sum_output(self, module: Any, inputs: Any, output: Tensor) -> Tensor:
        return summed(output, self.group)

    def _check(self, model: Any, layers: Sequence[torch.nn.Module]) -> None:
        """Raise UserError for what cannot be cut."""
        numbers = model.config.get_text_config()
        heads = getattr(numbers, "num_key_value_heads", None) or numbers.num_attention_heads
        if heads % self.size or numbers.num_attention_heads % self.size:
            raise UserError(
                f"strategy.tensor_parallel_size={self.size} does not divide the {heads} key heads "
                f"of this model; type a divisor of {heads}, or strategy=fsdp"
            )
        for layer in layers:
            for path, kind in self._kinds.items():
                if kind != ON_PARTS:
                    self._check_matrix(layer.get_submodule(path), path, kind)

    def _check_matrix(self, module: Any, path: str, kind: str) -> None:
        linear = _matrix(module)
        if type(linear) is not torch.nn.Linear:
            raise UserError(
                f"strategy.tensor_parallel_size={self.size} cuts plain matrices, and {path} is a "
                f"{type(linear).__name__}; type strategy=fsdp"
            )
        if len(getattr(module, "lora_magnitude_vector", ())):
            raise UserError(
                "adapter.use_dora=true measures whole columns, which strategy.tensor_parallel_size="
                f"{self.size} cuts; type adapter.use_dora=false, or strategy=fsdp"
            )
        side = linear.out_features if kind == BY_ROWS else linear.in_features
        if side % self.size:
            raise UserError(
                f"strategy.tensor_parallel_size={self.size} does not divide the {side} features of "
                f"{path}; type a divisor of {side}, or strategy=fsdp"
            )


def _kinds_by_path(model: Any) -> Mapping[str, str]:
    """Return how each module of a layer is cut, by its name in the layer, as the model says."""
    numbers = model.config.get_text_config()
    plan = numbers.base_model_tp_plan or {}
    kinds = {
        path: kind for full, kind in plan.items() for _, dot, path in [full.partition(".*.")] if dot
    }
    unknown = sorted(set(kinds.values()) - {BY_ROWS, BY_COLUMNS, ON_PARTS})
    if not kinds or unknown:
        why = f"cuts matrices as {unknown[0]}" if unknown else "has no plan for it"
        raise UserError(
            f"strategy.tensor_parallel_size: a {numbers.model_type} model {why}, which is not "
            "known here; type strategy=fsdp"
        )
    return kinds


def _matrix(module: Any) -> Any:
    """Return a matrix without the adapter around it."""
    return module._modules.get("base_layer", module)


def _adapter_parts(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of an adapter's one layer, by peft's names for them."""
    for part in ("lora_A", "lora_B"):
        if part in module._modules:
            yield part, module._modules[part]["default"]
    if "ia3_l" in module._modules:
        yield "ia3_l", module._modules["ia3_l"]


class _SummedLinear:
    """The forward of a linear layer of which each rank holds some columns."""

    def __init__(self, linear: torch.nn.Linear, group: Any) -> None:
        self.linear, self.group = linear, group

    def __call__(self, hidden: Tensor) -> Tensor:
        whole = summed(torch.nn.functional.linear(hidden, self.linear.weight), self.group)
        bias = self.linear.bias
        return whole if bias is None else whole + bias.to(whole.dtype)


def copied(tensor: Tensor, group: Any) -> Tensor:
    """Return a tensor as it is; the gradients that each rank of `group` has for it are added."""
    result: Tensor = _Copied.apply(tensor, group)
    return result


def summed(tensor: Tensor, group: Any) -> Tensor:
    """Return the sum of the tensors of all ranks of `group`."""
    result: Tensor = _Summed.apply(tensor, group)
    return result


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None]:
        grad = outer[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None]:
        return outer[0], None
