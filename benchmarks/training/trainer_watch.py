"""What the peers on transformers' Trainer have in common: arguments, and reports to the clock."""

from __future__ import annotations

from typing import Any

from clock import Clock
from task import Task
from transformers import TrainerCallback


def arguments_of(task: Task) -> dict[str, Any]:
    """Return the arguments of a training on the CPU that saves nothing."""
    return {
        "max_steps": task.steps,
        "learning_rate": task.lr,
        "lr_scheduler_type": "constant",
        "bf16": task.precision == "bf16",
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


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
