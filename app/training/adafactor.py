"""Adafactor, told to learn at the rate that the schedule says."""

from __future__ import annotations

from typing import Any

import torch
import transformers.optimization


class Adafactor(transformers.optimization.Adafactor):
    """Transformers' Adafactor, whose state stays in fp32 when it is restored.

    Not torch's: there the rate is a share of each weight's own size, so that LoRA's B, which
    starts at zero, hardly moves, and every weight is asked for its size on the host in every step.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state as it was; torch alone would round it to the weights' dtype."""
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
    """Build Adafactor over parameter groups; `lr` is what it is for AdamW."""
    return Adafactor(
        groups,
        decay_rate=beta2_decay,
        clip_threshold=clip_threshold,
        scale_parameter=False,
        relative_step=False,
    )
