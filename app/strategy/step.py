"""How a strategy takes an optimizer step: the second of its three interfaces.

Importing it needs neither torch nor Lightning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from app.strategy.placement import Placement

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from data_modules import Batch


class Step(Placement):
    """Forward and backward passes of placed weights and rows, and what becomes of gradients.

    Defaults: one micro-batch after the other, and every rank holds all gradients.
    """

    keeps_gradients = True
    """whether `weight.grad` exists until the optimizer step"""
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
        """Run the backward pass of a micro-batch."""
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
