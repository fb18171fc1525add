"""Ranks split each layer's matrices and see the same data, or hold different experts.

Tensor parallelism (arXiv 1909.08053): the first matrices of attention and feed-forward are split by
rows (each rank computes some heads or inner features), the last ones by columns (each rank's output
is a partial sum). `_Copy` before the first matrices, once for all that read the same
hidden states, sums the partial gradients; `_Reduce` after the last one sums the partial
outputs: two all-reduces per layer in each direction. Embedding and norms are replicated, and so is
a head tied to the embedding. An untied head is split by rows of the vocabulary, and the loss is
computed without gathering logits.

An adapter is split with its matrix. The low-rank side of a LoRA stays replicated; its gradients are
partial sums, which are all-reduced once per step. Split weights are plain tensors, so that FSDP2
can shard them further.

Expert parallelism (GShard, arXiv 2006.16668): in each layer a rank sends the hidden states of its
tokens to the ranks that hold the experts which its router has chosen, and receives the outputs. All
ranks have different rows, and all other weights are the same on all of them, or sharded. An adapter
of experts is split with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from app.model.adapter import expert_matrices, unfuse_adapters
from app.model.experts import Compute, expert_modules, repeat_rows
from app.model.head import LossHead
from app.strategy.settings import BY_ROWS, PARTIAL_GRADS, layer_plan
from common.errors import UserError


@dataclass(frozen=True, slots=True)
class SplitWeight:
    """A split weight, of which each rank has a part of a dimension."""

    module: torch.nn.Module
    name: str
    dim: int
    blocks: int = 1
    """equal blocks of that dimension, of each of which a rank has a part"""

    def keep(self, rank: int, size: int) -> None:
        """Replace the weight by the part of one of `size` ranks."""
        weight = getattr(self.module, self.name)
        part = self.part(weight.detach(), rank, size).contiguous().clone()
        part = torch.nn.Parameter(part, requires_grad=weight.requires_grad)
        self.module.register_parameter(self.name, part)

    def part(self, full: Tensor, rank: int, size: int) -> Tensor:
        """Return the part of a full tensor that one of `size` ranks has."""
        dim, blocks = self.dim, full.unflatten(self.dim, (self.blocks, -1))
        return blocks.chunk(size, dim + 1)[rank].flatten(dim, dim + 1)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        dim, blocks = self.dim, [part.unflatten(self.dim, (self.blocks, -1)) for part in parts]
        return torch.cat(blocks, dim + 1).flatten(dim, dim + 1)

    def full_shape(self, part: torch.Size, size: int) -> torch.Size:
        """Return the shape of the full tensor of which `size` ranks have parts of a shape."""
        return torch.Size([*part[: self.dim], part[self.dim] * size, *part[self.dim + 1 :]])


class TensorParallel:
    """Splits the layers of one model over the ranks of `group`."""

    def __init__(self, model: Any, group: Any, names: Sequence[str]) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self.splits: list[SplitWeight] = []
        self.partial_grads: list[torch.nn.Module] = []
        """replicated modules whose gradients are partial sums, such as norms of heads"""
        self._last_copy: tuple[Tensor, Tensor] | None = None
        """last input of a split matrix, and its `_Copy`; reused by matrices with the same
        input"""
        self._plan = layer_plan(model)
        self._check(model, [model.get_submodule(name) for name in names])
        unfuse_adapters(model)

    def split(self, layer: torch.nn.Module) -> None:
        """Replace a layer's full matrices by this rank's slices."""
        for path, kind in self._plan.items():
            module: Any = layer.get_submodule(path)
            if kind == PARTIAL_GRADS:
                self.partial_grads.append(module)
            elif kind == BY_ROWS:
                self._split_rows(module)
            else:
                self._split_columns(module)

    def _split_rows(self, module: Any) -> None:
        linear = _matrix(module)
        self._split_weight(linear, "weight", 0)
        self._split_weight(linear, "bias", 0)
        module.register_forward_pre_hook(self._copy_input)
        for part, tensors in _adapter_parts(module):
            if part == "lora_A":
                self.partial_grads.append(tensors)
            elif part == "lora_B":
                self._split_weight(tensors, "weight", 0)
            elif part == "ia3_l" and not module.is_feedforward:
                self._split_weight(tensors, "default", 0)

    def _split_columns(self, module: Any) -> None:
        linear = _matrix(module)
        self._split_weight(linear, "weight", 1)
        parts = dict(_adapter_parts(module))
        if "ia3_l" in parts and module.is_feedforward:
            self._split_weight(parts["ia3_l"], "default", 1)
        linear.forward = _PartialLinear(linear)
        # LoRA's output is a partial sum too: reduce it together with that of the matrix.
        reduced = module if "lora_A" in parts else linear
        if "lora_A" in parts:
            self._split_weight(parts["lora_A"], "weight", 1)
            self.partial_grads.append(parts["lora_B"])

        def reduce_output(_: Any, inputs: Any, output: Tensor) -> Tensor:
            self._forget_copy()
            full = _Reduce.apply(output, self.group)
            return full if linear.bias is None else full + linear.bias.to(full.dtype)

        reduced.register_forward_hook(reduce_output)

    def split_head(self, head: Any) -> None:
        """Replace the rows of a head without a bias by this rank's, if the ranks divide them.

        The loss covers the whole vocabulary; logits are gathered only if they are requested.
        """
        can_split = isinstance(head, LossHead) and head.bias is None
        if not can_split or head.out_features % self.size:
            return
        self._split_weight(head, "weight", 0)
        head.shard = _VocabularyShard(self.group, self.rank * head.weight.shape[0])
        head.register_forward_pre_hook(self._copy_input)

        def gather(_: Any, inputs: Any, output: Tensor) -> Tensor:
            self._forget_copy()
            return _Gather.apply(output, self.group) if output.numel() else output

        head.register_forward_hook(gather)

    def _split_weight(self, module: Any, name: str, dim: int) -> None:
        if getattr(module, name) is None:
            return
        split = SplitWeight(module, name, dim)
        split.keep(self.rank, self.size)
        self.splits.append(split)

    def _copy_input(self, module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, *others = inputs
        if self._last_copy is None or self._last_copy[0] is not hidden:
            copy = _Copy.apply(hidden, self.group)
            if copy.requires_grad:
                copy.register_hook(self._forget_copy)
            self._last_copy = hidden, copy
        return (self._last_copy[1], *others)

    def _forget_copy(self, _: Any = None) -> None:
        """Release the last copy; also a backward hook, since recompute may stop within a layer."""
        self._last_copy = None

    def _check(self, model: Any, layers: Sequence[torch.nn.Module]) -> None:
        """Raise UserError for layers that cannot be split."""
        text_config = model.config.get_text_config()
        heads = getattr(text_config, "num_key_value_heads", None) or text_config.num_attention_heads
        if heads % self.size or text_config.num_attention_heads % self.size:
            raise UserError(
                f"strategy.tensor_parallel_size={self.size} does not divide the {heads} key heads "
                f"of this model; type a divisor of {heads}, or strategy=fsdp"
            )
        for layer in layers:
            for path, kind in self._plan.items():
                if kind != PARTIAL_GRADS:
                    self._check_matrix(layer.get_submodule(path), path, kind)

    def _check_matrix(self, module: Any, path: str, kind: str) -> None:
        linear = _matrix(module)
        if type(linear) is not torch.nn.Linear:
            raise UserError(
                f"strategy.tensor_parallel_size={self.size} splits plain linear layers, and {path} "
                f"is a {type(linear).__name__}; type strategy=fsdp"
            )
        if len(getattr(module, "lora_magnitude_vector", ())):
            raise UserError(
                "adapter.use_dora=true needs full columns, which strategy.tensor_parallel_size="
                f"{self.size} splits; type adapter.use_dora=false, or strategy=fsdp"
            )
        side = linear.out_features if kind == BY_ROWS else linear.in_features
        if side % self.size:
            raise UserError(
                f"strategy.tensor_parallel_size={self.size} does not divide the {side} features of "
                f"{path}; type a divisor of {side}, or strategy=fsdp"
            )


@dataclass(frozen=True, slots=True)
class _VocabularyShard:
    """This rank's rows of a head, whose vocabulary is split over the ranks of `group`."""

    group: Any
    first_row: int

    def largest_(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)

    def sum_(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self.group)


def _matrix(module: Any) -> Any:
    """Return the linear layer inside of an adapter."""
    return getattr(module, "base_layer", module)


def _adapter_parts(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a layer's adapter by peft's names."""
    children = dict(module.named_children())
    for part in ("lora_A", "lora_B"):
        if part in children:
            yield part, children[part]["default"]
    if "ia3_l" in children:
        yield "ia3_l", children["ia3_l"]


class _PartialLinear:
    """The forward of a linear layer that is split by columns: a partial sum, without the bias."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        self.linear = linear

    def __call__(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.linear(hidden, self.linear.weight)


class _Gather(torch.autograd.Function):
    """Concatenate the tensors of all ranks of `group` along the last dimension."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        ctx.rank, ctx.width = dist.get_rank(group), tensor.shape[-1]
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None]:
        return outer[0].narrow(-1, ctx.rank * ctx.width, ctx.width), None


class _Copy(torch.autograd.Function):
    """Return a tensor unchanged; its gradient is summed over the ranks of `group`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None]:
        grad = outer[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Reduce(torch.autograd.Function):
    """Return the sum of a tensor over the ranks of `group`; its gradient is unchanged."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None]:
        return outer[0], None


class ExpertParallel:
    """Splits the experts of one model over the ranks of `group`."""

    partial_grads: tuple[torch.nn.Module, ...] = ()

    def __init__(self, model: Any, group: dist.ProcessGroup) -> None:
        self.group = group
        self.splits: list[SplitWeight] = []
        self._check(model)

    def split(self, layer: torch.nn.Module) -> None:
        """Replace a layer's experts, and their adapters, by those of this rank."""
        rank, size = self.group.rank(), self.group.size()
        weights = [(each, "weight", dim, blocks) for each, dim, blocks in expert_matrices(layer)]
        for _, experts in expert_modules(layer):
            experts.exchange = Exchange(self.group)
            weights += [
                (experts, name, 0, 1) for name, _ in experts.named_parameters(recurse=False)
            ]
        for module, name, dim, blocks in weights:
            split = SplitWeight(module, name, dim, blocks)
            split.keep(rank, size)
            if isinstance(module, torch.nn.Linear):  # a matrix of an adapter
                module.out_features, module.in_features = module.weight.shape
            self.splits.append(split)

    def _check(self, model: Any) -> None:
        """Raise UserError for experts that cannot be split."""
        model_type = model.config.model_type
        name = f"strategy.expert_parallel_size={self.group.size()}"
        found = [module for _, module in expert_modules(model)]
        if not found:
            raise UserError(
                f"{name}: {model_type} models have no fused experts to split; type "
                "strategy.expert_parallel_size=1"
            )
        for module in found:
            shared = [n for n, w in module.named_parameters() if len(w) != module.num_experts]
            if shared:
                raise UserError(
                    f"{name}: the experts of {model_type} models share {shared[0]}, whose "
                    "gradients are not summed over ranks yet; type strategy.expert_parallel_size=1"
                )


def experts_of(layer: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the modules of a layer that hold its experts and their adapters."""
    for name, _ in expert_modules(layer):
        yield layer.get_submodule(name.partition(".base_layer")[0])


class Exchange:
    """Computes a layer's experts for the rows of all ranks, on the ranks that hold them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, rows: Tensor, counts: Tensor, compute: Compute) -> Tensor:
        """Return the outputs of the experts for `rows` [rows, width].

        `rows` are sorted by expert; `counts` [experts]: rows of each of the experts of all ranks.
        """
        size = self.group.size()
        sent = counts.view(size, -1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        # The only wait of the host for the device: messages have sizes.
        to_send, to_receive = torch.stack([sent.sum(1), received.sum(1)]).tolist()
        # The factors: an expert's gradient is a sum over the tokens of `size` ranks, of which FSDP
        # takes the mean over `size` times fewer ranks than of other weights' gradients.
        arrived = _Send.apply(rows, to_send, to_receive, self.group, float(size))
        own = torch.arange(sent.shape[1], device=rows.device).repeat(size)
        own = own.repeat_interleave(received.flatten(), output_size=len(arrived))
        experts, order = own.sort(stable=True)  # rows arrive by rank, and then by expert
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        ends = received.sum(0).cumsum(0, dtype=torch.int32)
        outputs = compute(repeat_rows(arrived, order, places), experts, ends)
        outputs = repeat_rows(outputs, places, order)
        returned: Tensor = _Send.apply(outputs, to_receive, to_send, self.group, 1 / size)
        return returned


class _Send(torch.autograd.Function):
    """Send rows to other ranks; their gradients return, multiplied by a factor."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        to_send: list[int],
        to_receive: list[int],
        group: dist.ProcessGroup,
        factor: float,
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group, ctx.factor = to_send, to_receive, group, factor
        return _send(rows, to_send, to_receive, group)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Any, ...]:
        grad = _send(outer[0], ctx.received, ctx.sent, ctx.group)
        return grad.mul_(ctx.factor), None, None, None, None


def _send(
    rows: Tensor, to_send: list[int], to_receive: list[int], group: dist.ProcessGroup
) -> Tensor:
    received = rows.new_empty(sum(to_receive), rows.shape[1])
    dist.all_to_all_single(received, rows.contiguous(), to_receive, to_send, group=group)
    return received
