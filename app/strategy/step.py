"""How a strategy takes an optimizer step: the second of its three interfaces.

Importing it needs neither torch nor Lightning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Step:
    """What a step does with gradients. Defaults: every rank holds all of them."""

    keeps_gradients = True
    """whether `weight.grad` exists until the optimizer step"""
    norms_differ = False
    """whether ranks may clip by different gradient norms"""

    world_size: int

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
