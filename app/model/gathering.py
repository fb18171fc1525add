"""Gather sharded weights one at a time to save them, and write the gathered values back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from app.process.collectives import all_gather_list, broadcast_from_rank0

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Shards(Protocol):
    """What saving needs of a strategy that shards weights."""

    @property
    def root_device(self) -> torch.device:
        """Where this rank computes."""

    def reshard(self, model: Any) -> None:
        """Let every weight go back to where it is kept."""

    def full_tensor(self, weight: Tensor) -> Tensor:
        """Return a weight whole; all ranks call it, in the same order."""

    def weight_state(self, weight: torch.nn.Parameter) -> Any:
        """Return something of the whole weight's shape."""

    def restore_weight(self, weight: torch.nn.Parameter, value: Tensor) -> None:
        """Copy a whole value into a weight; all ranks call it, in the same order."""


class Gathering:
    """Gather weights as rank 0, which writes them, has them, and write these back on all ranks.

    A forward pass after it then shows whether the saved weights are the ones before: a part that
    got lost on the way is lost in the model, too.
    """

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        self.problems: list[str] = []

    def take(self, name: str, weight: Any, shape: torch.Size) -> Tensor:
        """Return a weight of `shape`, whole, on every rank."""
        import torch

        own = self.shards.full_tensor(weight)
        is_whole = own.shape == shape
        if not is_whole:
            found, needed = list(own.shape), list(shape)
            self.problems.append(f"{name} was gathered as {found} and not {needed}")
            own = torch.full(shape, torch.nan, dtype=own.dtype, device=own.device)
        taken = broadcast_from_rank0(own, self.shards.root_device)
        if is_whole and not torch.equal(taken, own.to(taken.device)):
            self.problems.append(f"{name} is not finite, or not gathered alike on all ranks")
        if weight.requires_grad:
            self.shards.restore_weight(weight, taken)
        return taken

    def check(self) -> None:
        """Raise ValueError on all ranks where a weight was not whole on one of them."""
        if problems := all_gather_list(self.problems):
            more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
            raise ValueError(problems[0] + more)


def round_weights(model: torch.nn.Module, shards: Shards, dtype: torch.dtype) -> None:
    """Round what trains to `dtype`, as it is read from a file, and as what is frozen was.

    Each weight keeps its own dtype.
    """
    shards.reshard(model)
    for weight in model.parameters():
        if weight.requires_grad and weight.dtype != dtype:
            rounded = shards.full_tensor(weight).to(dtype).to(weight.dtype)
            shards.restore_weight(weight, rounded)
