"""Optimizers that torch does not have as they are needed here, apart from those of 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import schedulefree
import torch
import transformers.optimization


class Adafactor(transformers.optimization.Adafactor):
    """Transformers' Adafactor, whose state stays in fp32 when it is restored.

    Not torch's: its learning rate is relative to each weight's norm, so that LoRA's B, which starts
    at zero, hardly moves, and it reads the norm of every weight on the host in every step.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state in its own dtype; torch alone would cast it to the weights'."""
        super().load_state_dict(state_dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, state in state_dict["state"].items():
            parameter = parameters[number]
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    self.state[parameter][name] = value.to(parameter.device, copy=True)


def build_adafactor(
    groups: list[dict[str, Any]], *, beta2_decay: float, clip_threshold: float
) -> torch.optim.Optimizer:
    """Build Adafactor over parameter groups, with an absolute `lr` as AdamW's."""
    return Adafactor(
        groups,
        decay_rate=beta2_decay,
        clip_threshold=clip_threshold,
        scale_parameter=False,
        relative_step=False,
    )


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

    def state_dict(self) -> dict[str, Any]:
        """Return both parts' states."""
        return {"muon": self.parts[0].state_dict(), "adamw": self.parts[1].state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore both parts' states."""
        for part, name in zip(self.parts, ("muon", "adamw"), strict=True):
            part.load_state_dict(state_dict[name])
        self.param_groups = [*self.parts[0].param_groups, *self.parts[1].param_groups]


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
