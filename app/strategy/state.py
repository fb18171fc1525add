"""How a strategy saves, gathers and restores weights and states: the last of its three interfaces.

Importing it needs neither torch nor Lightning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from app.strategy.disk_states import DiskTensor


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """A tensor of which each rank holds a shard (possibly empty) until it is gathered."""

    shape: torch.Size
    dtype: torch.dtype
    gather: Callable[[], Tensor]
    """returns the full tensor on every rank; all ranks must call it, in the same order"""


StateTensor: TypeAlias = "Tensor | ShardedTensor"
"""a tensor of a checkpoint, sharded or not"""
Allocate: TypeAlias = "Callable[[str, Tensor], Tensor | DiskTensor]"
"""returns an empty tensor for a state, by its key and its value in a checkpoint"""


class State:
    """Weights and optimizer states by weight. Defaults: every rank holds all of them."""

    def weights_by_group(self, optimizer: torch.optim.Optimizer) -> list[list[torch.nn.Parameter]]:
        """Return the weights of each parameter group that the optimizer was built with."""
        return [group["params"] for group in optimizer.param_groups]

    def weight_state(self, weight: torch.nn.Parameter) -> StateTensor:
        """Return a trainable weight for a checkpoint, in the optimizer's dtype, without a copy."""
        return weight.detach()

    def optimizer_dtype(self, weight: torch.nn.Parameter) -> torch.dtype:
        """Return the dtype in which the optimizer steps a weight."""
        return weight.dtype

    def optimizer_state_of(
        self, optimizer: torch.optim.Optimizer, weight: torch.nn.Parameter
    ) -> dict[str, Any]:
        """Return the optimizer state of a weight by key; empty before the first step."""
        states = optimizer.state.get(weight, {})
        return {key: _read_late(value) for key, value in states.items()}

    def restore_weight(self, weight: torch.nn.Parameter, value: Tensor) -> None:
        """Copy a full tensor into a weight; all ranks call it for all weights, in one order."""
        weight.data.copy_(value)

    def restore_optimizer_state(
        self,
        optimizer: torch.optim.Optimizer,
        weight: torch.nn.Parameter,
        states: Mapping[str, Tensor],
        allocate: Allocate,
    ) -> None:
        """Restore a weight's optimizer state from full tensors.

        `allocate(key, value)` returns an empty tensor for a state, on the right device. All ranks
        call it for all weights with states, in the same order.
        """
        for key, value in states.items():
            optimizer.state[weight][key] = allocate(key, value).copy_(value)

    def local_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Return tensors that differ between ranks, by name; each rank's file of a checkpoint."""
        return {}

    def restore_local_state(
        self, optimizer: torch.optim.Optimizer, state: Mapping[str, Tensor]
    ) -> None:
        """Restore `local_state`, last of all; `state` is empty if the checkpoint has none."""

    def full_tensor(self, weight: Tensor) -> Tensor:
        """Return the full tensor of a weight; all ranks call it, in the same order."""
        return weight.detach()


REPLICATED = State()
"""the state of models that have no trainer"""


def _read_late(value: Any) -> Any:
    """Return a state as it is, or one on a disk as a tensor that is read when it is gathered."""
    from app.strategy.disk_states import DiskTensor

    return value.as_state() if isinstance(value, DiskTensor) else value


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, without a copy."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
