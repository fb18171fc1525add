"""Optimizers beyond torch's: Muon with AdamW, schedule-free AdamW.

Their own `state_dict` is never used: `checkpoint/state.py` saves and restores by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import schedulefree
import torch


class MuonWithAdamW(torch.optim.Optimizer):
    """Step Muon and AdamW as one optimizer; a schedule sees the groups of both.

    Muon (github.com/KellerJordan/Muon; torch.optim.Muon) takes two-dimensional weights only.
    """

    def __init__(self, muon: torch.optim.Optimizer, adamw: torch.optim.Optimizer) -> None:
        self.parts = (muon, adamw)
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        # The same dictionaries, so that a new learning rate reaches the part that uses it.
        self.param_groups = [*muon.param_groups, *adamw.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the closure with gradients, then both optimizers; returns the closure's value."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss


def build_schedule_free(
    groups: list[dict[str, Any]], *, betas: tuple[float, float], eps: float
) -> torch.optim.Optimizer:
    """Build schedule-free AdamW (arXiv 2405.15682) over parameter groups.

    Gradients are taken between the newest weights and their average, and the average is the result.
    The model holds one of the two; the optimizer's state turns one into the other. The warm-up is
    the schedule's.
    """
    return schedulefree.AdamWScheduleFree(groups, betas=betas, eps=eps)


def use_training_weights(optimizer: Any) -> None:
    """Put the weights to take gradients at into the model, if this is schedule-free AdamW."""
    if isinstance(optimizer, schedulefree.AdamWScheduleFree):
        optimizer.train()


def use_averaged_weights(optimizer: Any) -> None:
    """Put the averaged weights into the model for evaluation, if this is schedule-free AdamW."""
    if isinstance(optimizer, schedulefree.AdamWScheduleFree):
        optimizer.eval()
