"""How a strategy spreads weights, optimizer states and data over its ranks.

The one seam between the training and its strategies: what a step, a checkpoint or a save must know
of where things are is asked here. `StrategyMixin` is the plain case, in which every rank holds
everything; strategies that hold parts override what differs for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BuildModel = Callable[..., Any]
"""makes the model that trains; with `on_meta=True` its shapes alone, without reading a weight"""


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """A tensor of which each rank holds a part, or none: known by its shape till it is gathered."""

    shape: torch.Size
    dtype: torch.dtype
    gather: Callable[[], Tensor]
    """returns the whole, on every rank; all ranks must call it, in the same order"""


StateTensor = Any
"""a Tensor or a ShardedTensor"""


class StrategyMixin:
    """A mix-in for Lightning's strategies; as it stands: all ranks hold all, each its own data."""

    shards_weights = False
    """whether ranks hold parts of weights: a forward pass or a save then needs all of them"""
    keeps_gradients = True
    """whether a gradient stays with its weight until the optimizer's step"""
    fuses_adapters = True
    """whether a layer may read the weights of the layers inside it, past their own forward"""

    world_size: int
    global_rank: int
    root_device: torch.device
    lightning_module: Any
    checkpoint_io: Any

    @property
    def num_data_ranks(self) -> int:
        """Count the ranks, or groups of ranks, that see data of their own."""
        return self.world_size

    @property
    def data_rank(self) -> int:
        """Say which of the `num_data_ranks` this rank belongs to."""
        return self.global_rank

    def build_model(self, build: BuildModel) -> Any:
        """Return the model as this strategy wants it before the optimizer is made."""
        return build()

    def unwrap_optimizer(self, optimizer: Any) -> torch.optim.Optimizer:
        """Return the optimizer that was built, out of what a strategy has put around it."""
        own: torch.optim.Optimizer = optimizer
        return own

    def weights_by_group(self, optimizer: torch.optim.Optimizer) -> list[list[torch.nn.Parameter]]:
        """Return the weights of each parameter group, as the optimizer was built with them."""
        return [group["params"] for group in optimizer.param_groups]

    def clip(self, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        """Clip the gradients by their global norm; return that norm, a scalar on the device."""
        import torch

        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def gradient(self, weight: torch.nn.Parameter) -> Tensor | None:
        """Return this rank's part of a weight's gradient, which `keeps_gradients`; None without."""
        return weight.grad

    def weight_state(self, weight: torch.nn.Parameter) -> StateTensor:
        """Return what a checkpoint keeps of a weight that trains: the precise one, not copied."""
        return weight.detach()

    def optimizer_dtype(self, weight: torch.nn.Parameter) -> torch.dtype:
        """Return the dtype of what the optimizer moves for a weight, which its states follow."""
        return weight.dtype

    def optimizer_state_of(
        self, optimizer: torch.optim.Optimizer, weight: torch.nn.Parameter
    ) -> dict[str, Any]:
        """Return an optimizer's state of a weight by key, empty before the first step."""
        return dict(optimizer.state.get(weight, {}))

    def restore_weight(self, weight: torch.nn.Parameter, value: Tensor) -> None:
        """Copy a whole value into a weight; called on all ranks for all weights, in one order."""
        weight.data.copy_(value)

    def restore_optimizer_state(
        self,
        optimizer: torch.optim.Optimizer,
        weight: torch.nn.Parameter,
        states: Mapping[str, Tensor],
        room: Callable[[str, Tensor], Tensor],
    ) -> None:
        """Give a weight whole states by key; `room` makes room for one on its right device.

        Called on all ranks for all weights that have states, in one order.
        """
        for key, value in states.items():
            optimizer.state[weight][key] = room(key, value).copy_(value)

    def gathered(self, module: torch.nn.Module) -> AbstractContextManager[None]:
        """Have a module's own weights whole, as in its forward; all ranks enter together."""
        return nullcontext()

    def reshard(self, model: Any) -> None:
        """Let every weight go back to where it is kept, after passes that left some whole."""

    def full_tensor(self, weight: Tensor) -> Tensor:
        """Return a weight as it is computed with, whole; all ranks call it, in the same order."""
        return weight.detach()

    # What Lightning asks of a strategy when it saves and restores: our checkpoints take weights and
    # states by name, so that no strategy has a way of its own.

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Hand Lightning's dictionary to what writes checkpoints, on every rank."""
        self.checkpoint_io.save_checkpoint(checkpoint, filepath)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: Any = None) -> dict[str, Any]:
        """Return the dictionary of a checkpoint, on every rank."""
        checkpoint: dict[str, Any] = self.checkpoint_io.load_checkpoint(checkpoint_path)
        return checkpoint

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return nothing: weights are not kept in Lightning's dictionary."""
        return {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Give the model what the checkpoint keeps of it."""
        self.lightning_module.load_state_dict(checkpoint["state_dict"])

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return nothing: states are not kept in Lightning's dictionary."""
        return {}


REPLICATED = StrategyMixin()
"""for models that no trainer holds"""
