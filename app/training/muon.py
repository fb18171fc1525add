"""Muon for matrices and AdamW for the rest, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class MuonWithAdamW(torch.optim.Optimizer):
    """Step two optimizers as one; a schedule sees the groups of both.

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
