"""Schedule-free AdamW: the door of `schedulefree`, and which of its two weights a model holds.

Gradients are taken between the newest weights and their average; the average is what was learned.
Only one of the two stands in the model, and the optimizer's state turns one into the other.
"""

from __future__ import annotations

from typing import Any

import schedulefree
import torch


def build_schedule_free(
    groups: list[dict[str, Any]], *, betas: tuple[float, float], eps: float
) -> torch.optim.Optimizer:
    """Build schedule-free AdamW over parameter groups; the warm-up is the schedule's."""
    return schedulefree.AdamWScheduleFree(groups, betas=betas, eps=eps)


def use_training_weights(optimizer: Any) -> None:
    """Put the weights that gradients are taken at into the model; nothing for other optimizers."""
    if isinstance(optimizer, schedulefree.AdamWScheduleFree):
        optimizer.train()


def use_averaged_weights(optimizer: Any) -> None:
    """Put the averaged weights into the model, to be measured or saved; nothing for others."""
    if isinstance(optimizer, schedulefree.AdamWScheduleFree):
        optimizer.eval()
