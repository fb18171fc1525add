"""How a model comes onto its ranks: one rank of a node has read it, and hands its tensors on."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from app.model.quantization import give_states, take_states
from app.process.errors import UserError

log = logging.getLogger(__name__)

STATUS = Path("/proc/self/status")
GIB = 2**30


class Broadcaster:
    """Hands a model's tensors from the rank that holds them to the others, one at a time.

    The others built it on `meta`. What trains comes from the first rank of the run, whose numbers
    may be random; the rest from the first rank of each node, `reads_here` where this one is it.
    """

    def __init__(self, device: torch.device, num_ranks: int, ranks_per_node: int) -> None:
        self.device = device
        self._num_ranks = num_ranks
        self._of_node: Any = None
        self._node_reader = dist.get_rank() // ranks_per_node * ranks_per_node
        self._is_alone = ranks_per_node == 1
        self.reads_here = dist.get_rank() == self._node_reader
        if num_ranks > ranks_per_node > 1:
            self._of_node, _ = dist.new_subgroups(ranks_per_node)

    def check_same(self, model: torch.nn.Module) -> None:
        """Make sure that all ranks have built the same modules; RuntimeError on all of them."""
        # Quantized weights are packed where they are, and not yet on `meta`.
        own = [
            (name, *(() if type(t).__name__ == "Params4bit" else (tuple(t.shape), t.dtype)))
            for name, t in _named_tensors(model)
        ]
        hashes: list[Any] = [None] * self._num_ranks
        dist.all_gather_object(hashes, hashlib.sha256(repr(own).encode()).hexdigest())
        if len(set(hashes)) == 1:
            return
        # All raise, since one that went on would wait for the others; what they say is long.
        built: list[Any] = [None] * self._num_ranks
        dist.all_gather_object(built, own)
        first = built[0]
        rank, other = next(pair for pair in enumerate(built) if pair[1] != first)
        pairs = zip_longest(first, other, fillvalue="nothing")
        here, there = next(pair for pair in pairs if pair[0] != pair[1])
        raise RuntimeError(f"rank 0 has built {here} where rank {rank} has {there}")

    def hand_states(self, module: torch.nn.Module) -> None:
        """Let all ranks know how the 4-bit weights in `module` are kept, before they are handed."""
        states = [take_states(module, self.device)]
        if not self._is_alone:
            dist.broadcast_object_list(states, self._node_reader, group=self._of_node)
        if not self.reads_here:
            give_states(module, states[0], self.device)

    def hand(self, modules: Iterable[torch.nn.Module]) -> None:
        """Put the tensors of `modules` on this rank's device, whole; one that is shared once."""
        arrived: dict[int, torch.nn.Parameter] = {}
        for module in modules:
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    if id(parameter) not in arrived:
                        arrived[id(parameter)] = self._parameter(parameter)
                    module._parameters[name] = arrived[id(parameter)]
            self.hand_unlearned(module)

    def hand_unlearned(self, module: torch.nn.Module) -> None:
        """Put on this rank's device what a module itself has besides parameters."""
        for tensors in (module._buffers, vars(module)):
            for name, tensor in tensors.items():
                if isinstance(tensor, Tensor):
                    tensors[name] = self._receive(tensor)

    def _parameter(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        if type(parameter) is not torch.nn.Parameter:
            raise UserError(
                f"this strategy cannot share out weights that are kept as "
                f"{type(parameter).__name__}; type quantization=nf4 or none, or strategy=ddp"
            )
        whole = self._receive(parameter.detach(), broadcast_from_rank0=parameter.requires_grad)
        return torch.nn.Parameter(whole, requires_grad=parameter.requires_grad)

    def _receive(self, tensor: Tensor, *, broadcast_from_rank0: bool = False) -> Tensor:
        if tensor.is_meta:
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        else:
            whole = tensor.to(self.device).contiguous()
        if broadcast_from_rank0 and self._num_ranks > 1:
            dist.broadcast(whole, 0)
        elif not self._is_alone:
            dist.broadcast(whole, self._node_reader, group=self._of_node)
        return whole


def _named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    for module_name, module in model.named_modules():
        for tensors in (module._parameters, module._buffers, vars(module)):
            for name, tensor in tensors.items():
                if isinstance(tensor, Tensor):
                    yield f"{module_name}.{name}", tensor


def peak_host_bytes() -> int:
    """Return the most memory that this process has held so far."""
    lines = (line.split() for line in STATUS.read_text().splitlines())
    return next(int(words[1]) * 1024 for words in lines if words[0] == "VmHWM:")


def log_host_memory(before: int, *, reads_here: bool) -> None:
    """Say on the first rank what loading has cost every rank in host memory."""
    own = before, peak_host_bytes(), reads_here
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    said = ", ".join(
        f"rank {rank} {start / GIB:.2f} -> {end / GIB:.2f}{' (reads the base)' if reads else ''}"
        for rank, (start, end, reads) in enumerate(ranks)
    )
    if dist.get_rank() == 0:
        log.info("load: peak host memory in GiB, before and after: %s", said)
