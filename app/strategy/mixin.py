"""What a strategy is asked: where weights live, how to take a step, how state is saved.

Three interfaces, whose defaults are the replicated case, in which every rank holds all weights and
states; sharding strategies override what differs. `StrategyMixin` makes Lightning's loops use them.
Importing it needs neither torch nor Lightning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from app.strategy.settings import TIMEOUT

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from app.strategy.disk_states import DiskTensor
    from data_modules import Batch

BuildModel = Callable[..., Any]
"""builds the model on `device` (the CPU by default); `on_meta=True` creates meta tensors and reads
no weights, `on_host=True` reads the weights into host memory first"""


class Placement:
    """Where modules and rows go, and how weights are made.

    Defaults: every rank holds all weights and gets rows of its own.
    """

    shards_weights = False
    """whether weights are sharded; forward passes and saves then need all ranks"""
    fuses_adapters = True
    """whether a layer may read its submodules' weights without calling their forward"""
    gathers_by_module = False
    """whether weights are whole only while the forward of the module that has them runs"""

    context_size = 1
    """neighbouring ranks that hold slices of the same rows"""

    pipeline_size = 1
    """ranks that hold stages of the same copy of the model"""

    world_size: int
    global_rank: int
    root_device: torch.device

    @property
    def num_data_ranks(self) -> int:
        """Number of ranks, or groups of ranks, that get different rows."""
        return self.world_size // self.context_size

    @property
    def data_rank(self) -> int:
        """Index of this rank, or its group, among the `num_data_ranks`."""
        return self.global_rank // self.context_size

    @cached_property
    def context_ranks(self) -> ProcessGroup | None:
        """The ranks that hold slices of this rank's rows, None without; all ranks ask together."""
        if self.context_size == 1:
            return None
        import torch.distributed as dist

        # Neighbours, so that the ranks over which weights are sharded need no dimension for them.
        own, _ = dist.new_subgroups(self.context_size, timeout=TIMEOUT)
        return own

    def shard_batch(self, batch: Batch) -> Batch:
        """Return the part of a micro-batch that this rank computes: a slice of its rows, or all."""
        if (ranks := self.context_ranks) is None:
            return batch
        from data_modules import SequenceSlice

        return batch.part(SequenceSlice.of_rank(batch.input_ids.shape[1], ranks))

    def build_model(self, build: BuildModel) -> Any:
        """Build the model and place its weights; called before the optimizer is built."""
        device = self.root_device
        return build(device=None if device.type == "cpu" else device)

    def build_frozen(self, build: BuildModel) -> Any:
        """Build another model, which nothing trains: whole on each rank, unless this shards it."""
        return Placement.build_model(self, build)

    def release(self, model: Any) -> None:
        """Forget a model of `build_frozen`, which nothing else may hold then."""

    def gathered(self, module: torch.nn.Module) -> AbstractContextManager[None]:
        """Gather a module's own weights, as its forward does; all ranks enter this together."""
        return nullcontext()

    def set_leaf_modules(self, modules: Iterable[torch.nn.Module]) -> None:
        """Gather each module's weights once per forward pass, with those of its submodules.

        Needed for modules that call their submodules a different number of times on each rank.
        """

    def reshard(self, model: Any) -> None:
        """Reshard all weights that forward passes have left gathered."""


class Step(Placement):
    """Forward and backward passes of placed weights and rows, and what becomes of gradients.

    Defaults: one micro-batch after the other, and every rank holds all gradients.
    """

    keeps_gradients = True
    """whether `weight.grad` exists until the optimizer step"""
    accumulates_in_products = False
    """whether a product may add a weight's gradient to `weight.grad`, past autograd's hooks"""
    norms_differ = False
    """whether ranks may clip by different gradient norms"""

    lightning_module: Any
    model: Any
    """the module, or a wrapper whose forward and backward synchronize the ranks"""
    precision_plugin: Any

    def run_micro_batches(
        self, batches: Sequence[Batch], loss: Callable[[Batch], Tensor]
    ) -> Tensor:
        """Run all forward and backward passes of an optimizer step; return the sum of the losses.

        `loss` returns what to differentiate of a micro-batch. Gradients add up in the weights; the
        last pass synchronizes them between the ranks, which all pass equally many batches.
        """
        *earlier, last = batches
        with self.accumulating() if earlier else nullcontext():
            losses = [self._run_micro_batch(batch, loss) for batch in earlier]
        return sum(losses, self._run_micro_batch(last, loss))

    def _run_micro_batch(self, batch: Batch, loss: Callable[[Batch], Tensor]) -> Tensor:
        # Moved one by one: the device holds the rows of a micro-batch, not those of the step.
        is_gpu = self.root_device.type == "cuda"
        part = self.shard_batch(batch).to(self.root_device, non_blocking=is_gpu)
        value: Tensor = self.run_forward(loss, part)
        # Lightning's plugin scales the loss of fp16, and calls the hooks around a backward pass.
        scaled = self.precision_plugin.pre_backward(value, self.lightning_module)
        self.run_backward(scaled)
        self.precision_plugin.post_backward(scaled, self.lightning_module)
        return value.detach()

    def run_forward(self, run: Callable[..., Any], *args: Any) -> Any:
        """Call `run(*args)` as the forward of the strategy's wrapper, in the autocast of a step."""
        module = self.lightning_module

        def forward(*args: Any) -> Any:
            # In here: DeepSpeed's wrapper disables an autocast context outside of it.
            with self.precision_plugin.forward_context():
                return run(*args)

        if self.model is module:
            return forward(*args)
        module.forward = forward
        try:
            return self.model(*args)
        finally:
            del module.forward

    def run_backward(self, loss: Tensor) -> None:
        from app.model.accumulation import accumulating_in_products

        with accumulating_in_products(self.accumulates_in_products):
            loss.backward()

    def accumulating(self) -> AbstractContextManager[None]:
        """Return the context of micro-batches that are not the last one of a step."""
        return nullcontext()

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
    def holds_loss(self) -> bool:
        """Whether this rank computes the loss of its rows; others add 0 to sums over ranks."""
        return True

    @property
    def random_rank(self) -> int:
        """Index of this rank among those that draw different random numbers: by their tokens."""
        return self.global_rank // self.num_loss_copies

    def clip(self, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        """Clip gradients by their global norm; return the norm before clipping, a device scalar."""
        import torch

        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not clips_in_step(optimizer):
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        clip_in_step(optimizer, norm, max_norm)
        return norm

    def gradient(self, weight: torch.nn.Parameter) -> Tensor | None:
        """Return this rank's shard of a weight's gradient, or None; see `keeps_gradients`."""
        return weight.grad

    def end_step(self, step: int, *, is_last: bool) -> None:
        """Run after optimizer step number `step`, even if that step was skipped."""

    def load_averaged_weights(self) -> None:
        """Load the mean of the ranks' weights into the model, for evaluation or saving."""

    def load_local_weights(self) -> None:
        """Undo `load_averaged_weights`: load this rank's own weights into the model again."""


def clips_in_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's kernels can scale gradients as they read them.

    A fused AdamW on a GPU can, and AdamW8bit where it says so. On a CPU gradients are scaled first,
    as in `clip_grad_norm_`.
    """
    import torch

    if getattr(optimizer, "clips_in_step", False):
        return True
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
        return dict(optimizer.state.get(weight, {}))

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


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, without a copy."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class StrategyMixin(Step, State):
    """Makes Lightning's loops and checkpoints use the three interfaces.

    Checkpoints hold weights and states by name, in the same format for every strategy.
    """

    checkpoint_io: Any
    accelerator: Any
    cluster_environment: Any = None

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

    def training_step(self, *args: Any) -> Any:
        """Run an optimizer step's forward and backward passes, by the module."""
        return self.lightning_module.training_step(*args)

    def backward(self, closure_loss: Any, *args: Any, **kwargs: Any) -> Any:
        """Do nothing: `run_micro_batches` has run the backward passes."""
        return closure_loss

    def validation_step(self, batch: Any, *args: Any) -> Any:
        """Run the module's validation step on this rank's part of a micro-batch."""
        module = self.lightning_module
        return self.run_forward(module.validation_step, self.shard_batch(batch), *args)

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
        self.lightning_module.load_state_dict(checkpoint["state_dict"])

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return an empty dictionary: Lightning's checkpoint does not hold optimizer states."""
        return {}
