"""Expert parallelism: neighbouring ranks hold different experts (GShard, arXiv 2006.16668).

In each layer a rank sends the hidden states of its tokens to the ranks that hold the experts which
its router has chosen, and receives the outputs. All ranks have different rows, and all other
weights are the same on all of them, or sharded. An adapter of experts is split with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from app.model.adapter import expert_matrices
from app.model.experts import Compute, expert_modules, repeat_rows
from app.strategy.tensor_parallel import Split
from common.errors import UserError


class ExpertParallel:
    """Splits the experts of one model over the ranks of `group`."""

    partial_grads: tuple[torch.nn.Module, ...] = ()

    def __init__(self, model: Any, group: dist.ProcessGroup) -> None:
        self.group = group
        self.splits: list[Split] = []
        self._check(model)

    def split(self, layer: torch.nn.Module) -> None:
        """Replace a layer's experts, and their adapters, by those of this rank."""
        rank, size = self.group.rank(), self.group.size()
        for _, experts in expert_modules(layer):
            experts.exchange = Exchange(self.group)
        for module, name, dim, blocks in _weights_of_experts(layer):
            split = Split(module, name, dim, blocks)
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


def _weights_of_experts(layer: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, int, int]]:
    """Yield module, name, dimension of experts and blocks in it of each weight to split."""
    for module, dim, blocks in expert_matrices(layer):
        yield module, "weight", dim, blocks
    for _, experts in expert_modules(layer):
        yield from ((experts, name, 0, 1) for name, _ in experts.named_parameters(recurse=False))


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
