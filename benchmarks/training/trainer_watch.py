"""What the peers on transformers' Trainer report to the clock."""

from __future__ import annotations

from typing import Any

from clock import Clock
from transformers import TrainerCallback


class Watch(TrainerCallback):
    """Records the end of each step and each logged loss."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Record the end of a step."""
        self.clock.step()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Record a loss, if one is logged."""
        if "loss" in logs:
            self.clock.losses.append(float(logs["loss"]))
