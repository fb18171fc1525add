"""How the learning rate moves over a run: a pure function of the step, the run's length, the shape.

The momentum of an optimizer is left alone, also by one_cycle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from data_modules import setting

if TYPE_CHECKING:
    import torch

SHAPES = ("cosine", "linear", "constant", "one_cycle", "wsd")


@dataclass(kw_only=True, slots=True)
class ScheduleConfig:
    shape: str = setting("cosine", choices=SHAPES)
    """after the warm-up: cosine, linear, constant, one_cycle, or wsd (stays, then falls steeply)"""
    warmup_ratio: float = setting(0.03, ge=0, lt=1, shown=("train",))
    """share of all optimizer steps in which the learning rate rises from 0"""
    warmup_steps: int | None = setting(None, ge=0)
    """the same in steps; wins over warmup_ratio"""
    min_lr_ratio: float = setting(0.0, ge=0, le=1)
    """where cosine, linear, one_cycle and wsd end, as a share of the peak"""
    start_lr_ratio: float = setting(0.04, gt=0, le=1)
    """where one_cycle starts, as a share of the peak"""
    decay_ratio: float = setting(0.2, gt=0, le=1, note="0.1 to 0.2 is usual")
    """share of all optimizer steps, at the end, in which wsd falls"""


def build_schedule(
    optimizer: torch.optim.Optimizer, config: ScheduleConfig, total_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Build the schedule over `total_steps` optimizer steps, the same for any number of ranks."""
    import torch

    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_factor(step, total_steps, config)
    )


def lr_factor(step: int, total_steps: int, config: ScheduleConfig) -> float:
    """Share of the peak learning rate that optimizer step `step` (from 0) uses.

    The first step already moves; the peak is reached with the warm-up's last step.
    """
    warmup = config.warmup_steps
    if warmup is None:
        warmup = math.ceil(config.warmup_ratio * total_steps)
    if config.shape == "one_cycle":
        return _one_cycle(step, warmup, total_steps, config)
    if step < warmup:
        return (step + 1) / warmup
    start = warmup
    if config.shape == "wsd":
        start = max(warmup, total_steps - math.ceil(config.decay_ratio * total_steps))
    progress = min(1.0, max(0, step - start) / max(1, total_steps - start))
    remaining = {
        "cosine": _half_cosine(progress),
        "linear": 1.0 - progress,
        "constant": 1.0,
        # The best of the shapes tried by Haegele et al. (arXiv 2405.18392), with a fifth of the
        # steps as good as a cosine over all of them.
        "wsd": 1.0 - math.sqrt(progress),
    }[config.shape]
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * remaining


def _one_cycle(step: int, warmup: int, total_steps: int, config: ScheduleConfig) -> float:
    """Rise and fall along half a cosine each, to the end in the last step (arXiv 1708.07120).

    The same as torch's OneCycleLR, where the peak falls on a whole step.
    """
    peak = max(warmup - 1, 0)
    if step < peak:
        return 1.0 + (config.start_lr_ratio - 1.0) * _half_cosine(step / peak)
    progress = min(1.0, (step - peak) / max(1, total_steps - 1 - peak))
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * _half_cosine(progress)


def _half_cosine(progress: float) -> float:
    """Fall from 1 to 0 as `progress` goes from 0 to 1."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))
