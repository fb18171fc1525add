"""Load a model to be sharded: one rank per node reads the weights and broadcasts them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from app.model.quantization import attach_quant_states, detach_quant_states
from app.process.collectives import all_gather, is_rank0
from app.process.environment import host_bytes
from app.strategy.settings import TIMEOUT
from common.errors import UserError

log = logging.getLogger(__name__)

_GIB = 2**30


class Broadcaster:
    """Broadcasts a model's tensors, one at a time, to ranks that have built it on `meta`.

    Trainable parameters come from rank 0, since they may be random; all others from the first rank
    of each node, on which `reads_here` is true.
    """

    def __init__(self, device: torch.device, num_ranks: int, ranks_per_node: int) -> None:
        self.device = device
        self._num_ranks = num_ranks
        self._node_group: Any = None
        self._node_reader = dist.get_rank() // ranks_per_node * ranks_per_node
        self._is_only_rank = ranks_per_node == 1
        self.reads_here = dist.get_rank() == self._node_reader
        if num_ranks > ranks_per_node > 1:
            self._node_group, _ = dist.new_subgroups(ranks_per_node, timeout=TIMEOUT)

    def check_same(self, model: torch.nn.Module) -> None:
        """Raise RuntimeError on all ranks unless all have built the same modules."""
        # Shape and dtype of quantized weights differ: they are packed only on the reading rank.
        # Which weights are tied decides how many are broadcast: others would wait for one more.
        owners: dict[int, str] = {}
        own = [
            (
                name,
                *(() if type(t).__name__ == "Params4bit" else (tuple(t.shape), t.dtype)),
                owners.setdefault(id(t), name),
            )
            for name, t in _named_tensors(model)
        ]
        if len(set(all_gather(hashlib.sha256(repr(own).encode()).hexdigest()))) == 1:
            return
        # All ranks raise: a rank that continued would wait for the others.
        built = all_gather(own)
        first = built[0]
        rank, other = next(pair for pair in enumerate(built) if pair[1] != first)
        pairs = zip_longest(first, other, fillvalue="nothing")
        on_first, on_other = next(pair for pair in pairs if pair[0] != pair[1])
        raise RuntimeError(f"rank 0 has built {on_first} where rank {rank} has {on_other}")

    def broadcast_quantization(self, module: torch.nn.Module) -> None:
        """Broadcast the quantization state of 4-bit weights; called before `broadcast`."""
        states = [detach_quant_states(module, self.device)]
        if not self._is_only_rank:
            dist.broadcast_object_list(states, self._node_reader, group=self._node_group)
        if not self.reads_here:
            attach_quant_states(module, states[0], self.device)

    def broadcast(self, modules: Iterable[torch.nn.Module]) -> None:
        """Put the full tensors of `modules` on this rank's device; tied weights stay tied."""
        arrived: dict[int, torch.nn.Parameter] = {}
        for module in modules:
            own = list(module.named_parameters(recurse=False, remove_duplicate=False))
            for name, parameter in own:
                if id(parameter) not in arrived:
                    arrived[id(parameter)] = self._parameter(parameter)
                module.register_parameter(name, arrived[id(parameter)])
            self.broadcast_buffers(module)

    def broadcast_buffers(self, module: torch.nn.Module) -> None:
        """Put buffers and plain tensor attributes of `module` on this rank's device."""
        for name, tensor in list(_plain_tensors(module)):
            setattr(module, name, self._receive(tensor))

    def _parameter(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        if type(parameter) is not torch.nn.Parameter:
            raise UserError(
                f"this strategy cannot shard weights of type {type(parameter).__name__}; type "
                "quantization=nf4 or none, or strategy=ddp"
            )
        full = self._receive(parameter.detach(), broadcast_from_rank0=parameter.requires_grad)
        return torch.nn.Parameter(full, requires_grad=parameter.requires_grad)

    def _receive(self, tensor: Tensor, *, broadcast_from_rank0: bool = False) -> Tensor:
        if tensor.is_meta:
            full = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        else:
            full = tensor.to(self.device).contiguous()
        if broadcast_from_rank0 and self._num_ranks > 1:
            dist.broadcast(full, 0)
        elif not self._is_only_rank:
            dist.broadcast(full, self._node_reader, group=self._node_group)
        return full


def _named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    for module_name, module in model.named_modules():
        for name, tensor in (
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *_plain_tensors(module),
        ):
            yield f"{module_name}.{name}", tensor


def _plain_tensors(module: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's own buffers and the tensors among its plain attributes."""
    yield from module.named_buffers(recurse=False, remove_duplicate=False)
    yield from ((name, value) for name, value in vars(module).items() if isinstance(value, Tensor))


def peak_host_bytes() -> int:
    """Return the peak resident memory of this process so far."""
    return host_bytes("VmHWM")


def log_host_memory(before: int, *, reads_here: bool) -> None:
    """Log on rank 0 the peak host memory of every rank before and after loading."""
    ranks = all_gather((before, peak_host_bytes(), reads_here))
    peaks = ", ".join(
        f"rank {rank} {start / _GIB:.2f} -> {end / _GIB:.2f}{' (reads the base)' if reads else ''}"
        for rank, (start, end, reads) in enumerate(ranks)
    )
    if is_rank0():
        log.info("load: peak host memory in GiB, before and after: %s", peaks)
