"""The interface of a strategy to training steps, checkpoints and saved models.

`StrategyMixin` implements the replicated case, in which every rank holds all weights and states;
sharding strategies override what differs. Importing it needs neither torch nor Lightning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BuildModel = Callable[..., Any]
"""builds the model on `device` (the CPU by default); `on_meta=True` creates meta tensors and reads
no weights, `on_host=True` reads the weights into host memory first"""


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """A tensor of which each rank holds a shard (possibly empty) until it is gathered."""

    shape: torch.Size
    dtype: torch.dtype
    gather: Callable[[], Tensor]
    """returns the full tensor on every rank; all ranks must call it, in the same order"""


StateTensor: TypeAlias = "Tensor | ShardedTensor"
"""a tensor of a checkpoint, sharded or not"""


class StrategyMixin:
    """A mixin for Lightning strategies. Defaults: every rank holds all weights and its own data."""

    shards_weights = False
    """whether weights are sharded; forward passes and saves then need all ranks"""
    keeps_gradients = True
    """whether `weight.grad` exists until the optimizer step"""
    fuses_adapters = True
    """whether a layer may read its submodules' weights without calling their forward"""
    norms_differ = False
    """whether ranks may clip by different gradient norms"""

    world_size: int
    global_rank: int
    root_device: torch.device
    lightning_module: Any
    model: Any
    checkpoint_io: Any
    precision_plugin: Any
    accelerator: Any
    cluster_environment: Any = None

    @property
    def num_data_ranks(self) -> int:
        """Number of ranks, or groups of ranks, that get different rows."""
        return self.world_size

    @property
    def data_rank(self) -> int:
        """Index of this rank, or its group, among the `num_data_ranks`."""
        return self.global_rank

    @property
    def num_averaged_ranks(self) -> int:
        """Number of ranks over whose gradients a step takes the mean, which a loss undoes."""
        return self.world_size

    @property
    def num_loss_copies(self) -> int:
        """Number of ranks that count the same loss, by which a sum over all ranks is divided.

        1 if the ranks of a group compute different parts of the loss of their rows.
        """
        return 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of a distributed sampler for this rank."""
        return {"num_replicas": self.num_data_ranks, "rank": self.data_rank}

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Create tensors on the CPU unless their device is named; Lightning enters this to build.

        Lightning's own would draw the start of an adapter on the GPU, from its random numbers, so
        that a seed would give another run than on a CPU or under FSDP.
        """
        with self.precision_plugin.tensor_init_context():
            yield

    def build_model(self, build: BuildModel) -> Any:
        """Build the model and place its weights; called before the optimizer is built."""
        device = self.root_device
        return build(device=None if device.type == "cpu" else device)

    def unwrap_optimizer(self, optimizer: Any) -> torch.optim.Optimizer:
        """Return the optimizer without the wrapper of a strategy."""
        inner: torch.optim.Optimizer = optimizer
        return inner

    def weights_by_group(self, optimizer: torch.optim.Optimizer) -> list[list[torch.nn.Parameter]]:
        """Return the weights of each parameter group that the optimizer was built with."""
        return [group["params"] for group in optimizer.param_groups]

    def clip(self, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        """Clip gradients by their global norm; return the norm before clipping, a device scalar."""
        import torch

        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not clips_in_step(optimizer):
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        clip_in_step(optimizer, norm, max_norm)
        return norm

    def end_step(self, step: int, *, is_last: bool) -> None:
        """Run after optimizer step number `step`, even if that step was skipped."""

    def use_mean_weights(self) -> None:
        """Load the mean of the ranks' weights into the model, for evaluation or saving."""

    def use_own_weights(self) -> None:
        """Undo `use_mean_weights`: load this rank's own weights into the model again."""

    def gradient(self, weight: torch.nn.Parameter) -> Tensor | None:
        """Return this rank's shard of a weight's gradient, or None; see `keeps_gradients`."""
        return weight.grad

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
        return dict(optimizer.state.get(weight, {}))

    def restore_weight(self, weight: torch.nn.Parameter, value: Tensor) -> None:
        """Copy a full tensor into a weight; all ranks call it for all weights, in one order."""
        weight.data.copy_(value)

    def restore_optimizer_state(
        self,
        optimizer: torch.optim.Optimizer,
        weight: torch.nn.Parameter,
        states: Mapping[str, Tensor],
        allocate: Callable[[str, Tensor], Tensor],
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

    def gathered(self, module: torch.nn.Module) -> AbstractContextManager[None]:
        """Gather a module's own weights, as its forward does; all ranks enter this together."""
        return nullcontext()

    def set_leaf_modules(self, modules: Iterable[torch.nn.Module]) -> None:
        """Gather each module's weights once per forward pass, with those of its submodules.

        Needed for modules that call their submodules a different number of times on each rank.
        """

    def reshard(self, model: Any) -> None:
        """Reshard all weights that forward passes have left gathered."""

    def full_tensor(self, weight: Tensor) -> Tensor:
        """Return the full tensor of a weight; all ranks call it, in the same order."""
        return weight.detach()

    # Overrides of Lightning's Strategy: checkpoints hold weights and states by name, in the same
    # format for every strategy.

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Pass Lightning's dictionary to the CheckpointIO, on every rank."""
        self.checkpoint_io.save_checkpoint(checkpoint, filepath)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: Any = None) -> dict[str, Any]:
        """Return a checkpoint's dictionary, on every rank."""
        checkpoint: dict[str, Any] = self.checkpoint_io.load_checkpoint(checkpoint_path)
        return checkpoint

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return nothing: weights are not stored in Lightning's dictionary."""
        return {}

    def teardown(self) -> None:
        """End what setup began; nothing is moved, since saving and evaluation follow.

        Lightning 2.6 would move all weights and optimizer states to the host.
        """
        self.model = self.lightning_module  # without a wrapper
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Restore the model from a checkpoint."""
        self.lightning_module.load_state_dict(checkpoint["state_dict"])

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return an empty dictionary: Lightning's checkpoint does not hold optimizer states."""
        return {}


def clips_in_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's kernels can scale gradients as they read them.

    A fused AdamW on a GPU can. On a CPU gradients are scaled first, as in `clip_grad_norm_`.
    """
    import torch

    groups = optimizer.param_groups
    return (
        isinstance(optimizer, torch.optim.AdamW)
        and all(group["fused"] for group in groups)
        and _is_on_gpu(groups[0]["params"][0])
    )


def clip_in_step(optimizer: Any, norm: Tensor, max_norm: float) -> None:
    """Have the next step of `optimizer` clip by `norm`, which saves a pass over all gradients."""
    # The fused kernels divide gradients by this attribute, which PyTorch's GradScaler sets.
    optimizer.grad_scale = ((norm.float() + 1e-6) / max_norm).clamp(min=1.0)


def _is_on_gpu(weight: Tensor) -> bool:
    return weight.device.type == "cuda"


REPLICATED = StrategyMixin()
"""the default strategy of models that have no trainer"""
