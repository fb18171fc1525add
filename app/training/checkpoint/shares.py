"""Which rank writes which tensors of a checkpoint: each whole, each once, in a file a rank.

Whole, whatever strategy trains: so a run of another strategy, or of other ranks, reads them by name
alone. What is scattered is gathered tensor by tensor, by all ranks together and in one order, and
written by the rank whose share is the least so far.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from app.process.heartbeat import beat_again
from app.strategy.shards import ShardedTensor, StateTensor
from app.training.checkpoint.tensors import in_order, num_bytes

if TYPE_CHECKING:
    from torch import Tensor

Write = Callable[[str, Mapping[str, StateTensor]], None]
"""writes a file of a checkpoint by its name; `CheckpointStore.add_tensors` of a step"""


def file_of(name: str, rank: int) -> str:
    """Name the file of a rank: the first rank's goes by the plain name, as a single process's."""
    return f"{name}-rank-{rank}" if rank else name


def owners(tensors: Mapping[str, StateTensor], num_ranks: int) -> dict[str, int]:
    """Say who writes each tensor: the first rank what every rank has, all what is scattered."""
    shares, owner = [0] * num_ranks, {}
    for name, tensor in in_order(tensors).items():
        rank = shares.index(min(shares)) if isinstance(tensor, ShardedTensor) else 0
        owner[name] = rank
        shares[rank] += num_bytes(tensor)
    return owner


def write_share(
    write: Write,
    name: str,
    tensors: Mapping[str, StateTensor],
    check: Callable[[Mapping[str, Tensor]], None],
    *,
    rank: int,
    num_ranks: int,
) -> None:
    """Write this rank's share of `tensors`; all ranks call it, each with the same names.

    `check` looks at what was scattered before it is written. Where this rank fails, it still helps
    the others to gather theirs, and raises then.
    """
    owner = owners(tensors, num_ranks)
    turns = _Turns(tensors, check)
    own = {name: turns.own(name, tensor) for name, tensor in tensors.items() if owner[name] == rank}
    try:
        if own or rank == 0:
            write(file_of(name, rank), own)
    finally:
        turns.finish()


class _Turns:
    """Gathers scattered tensors in the order in which every rank does."""

    def __init__(
        self, tensors: Mapping[str, StateTensor], check: Callable[[Mapping[str, Tensor]], None]
    ) -> None:
        self._check = check
        self._left = [
            (name, tensor)
            for name, tensor in in_order(tensors).items()
            if isinstance(tensor, ShardedTensor)
        ]
        self._left.reverse()

    def own(self, name: str, tensor: StateTensor) -> StateTensor:
        """Return `tensor` so that to gather it lets all that come before it have their turn."""
        if not isinstance(tensor, ShardedTensor):
            return tensor
        return replace(tensor, gather=lambda: self._gather(name))

    def _gather(self, name: str) -> Tensor:
        while self._left:
            turn, tensor = self._left.pop()
            whole = tensor.gather()
            beat_again()
            if turn == name:
                self._check({name: whole})
                return whole
        raise RuntimeError(f"{name} has had its turn")

    def finish(self) -> None:
        """Gather what is left, for those who write it."""
        while self._left:
            self._left.pop()[1].gather()
            beat_again()
