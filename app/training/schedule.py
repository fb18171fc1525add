"""The learning rate of a run: its peak, and its schedule as a pure function of the step.

Momentum is never scheduled, not even by one_cycle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.model.adapter import DEFAULT_LR, AdapterConfig
from app.training.optimizers import OptimizerConfig
from common.facts import setting

if TYPE_CHECKING:
    import torch

    from app.training.objective.settings import ObjectiveConfig

SHAPES = ("cosine", "linear", "constant", "one_cycle", "wsd")
USUAL_LR = {
    # Lowest and highest of published recipes: 1e-5 for LoRA on a 70B model (axolotl),
    # 5e-5 for full fine-tuning (transformers' default), 3e-3 for IA3 (arXiv 2205.05638).
    "lora": (1e-5, 5e-4),
    "ia3": (1e-3, 1e-2),
    "freeze": (1e-6, 5e-5),
    "full": (1e-6, 5e-5),
}
FAR = 10.0
"""factor outside the usual range from which on a run gets a warning"""


@dataclass(kw_only=True, slots=True)
class ScheduleConfig:
    shape: str = setting("cosine", choices=SHAPES)
    """shape of the learning rate after the warm-up: cosine, linear, constant, one_cycle, or wsd
    (warmup-stable-decay: constant, then a steep decay at the end)"""
    warmup_ratio: float = setting(0.03, ge=0, lt=1, shown=("train",))
    """share of all steps over which the learning rate rises from 0 to its peak"""
    warmup_steps: int | None = setting(None, ge=0, instead_of="warmup_ratio")
    """length of the warm-up in optimizer steps; overrides warmup_ratio"""
    min_lr_ratio: float = setting(0.0, ge=0, le=1)
    """final learning rate of cosine, linear, one_cycle and wsd, as a share of the peak"""
    start_lr_ratio: float = setting(0.04, gt=0, le=1)
    """initial learning rate of one_cycle, as a share of the peak"""
    decay_ratio: float = setting(0.2, gt=0, le=1, note="0.1 to 0.2 is usual")
    """share of all optimizer steps, at the end of the run, over which wsd decays"""


def build_schedule(
    optimizer: torch.optim.Optimizer, config: ScheduleConfig, total_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    import torch

    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_factor(step, total_steps, config)
    )


def lr_factor(step: int, total_steps: int, config: ScheduleConfig) -> float:
    """Return the share of the peak learning rate at optimizer step `step`, counted from 0.

    The first step has a rate above 0; the last step of the warm-up reaches the peak.
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
        # The best decay compared by Haegele et al. (arXiv 2405.18392): over a fifth of the steps
        # it is as good as a cosine over all of them.
        "wsd": 1.0 - math.sqrt(progress),
    }[config.shape]
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * remaining


def _one_cycle(step: int, warmup: int, total_steps: int, config: ScheduleConfig) -> float:
    """Return the factor of a one-cycle schedule: half a cosine up, half a cosine down.

    Equals torch's OneCycleLR if the peak falls on a whole step (arXiv 1708.07120).
    """
    peak = max(warmup - 1, 0)
    if step < peak:
        return 1.0 + (config.start_lr_ratio - 1.0) * _half_cosine(step / peak)
    progress = min(1.0, (step - peak) / max(1, total_steps - 1 - peak))
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * _half_cosine(progress)


def _half_cosine(progress: float) -> float:
    """Fall from 1 to 0 as `progress` goes from 0 to 1."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclass(frozen=True, slots=True)
class LearningRate:
    """The peak learning rate, where it comes from, and a warning if it is unusual."""

    value: float
    sentence: str
    """where the value comes from, with the arithmetic if it was scaled"""
    warning: str | None


def resolve_lr(
    optimizer: OptimizerConfig,
    adapter: AdapterConfig,
    global_batch_size: int,
    *,
    from_scratch: bool,
    objective: ObjectiveConfig | None = None,
) -> LearningRate:
    """Resolve the peak learning rate of a run.

    `global_batch_size`: packs (rows when not packing) per optimizer step over all ranks. No warning
    is given for a model trained from scratch. `objective`: None for sft.
    """
    ratio = 1.0 if objective is None else objective.lr_ratio
    start = DEFAULT_LR[adapter.name] * ratio if optimizer.lr is None else optimizer.lr
    value, sentence = start, f"lr {format_lr(start)}"
    if optimizer.scale_lr != "none":
        growth = global_batch_size / optimizer.base_batch_size
        factor = f"{global_batch_size} / {optimizer.base_batch_size}"
        if optimizer.scale_lr == "sqrt":
            value, factor = start * math.sqrt(growth), f"sqrt({factor})"
        else:
            value, factor = start * growth, f"({factor})"
        sentence = f"lr {format_lr(start)} x {factor} = {format_lr(value)}"
    if optimizer.lr is None:
        of = "" if objective is None or ratio == 1 else f" with objective={objective.name}"
        sentence += f" ({format_lr(start)} is the default of adapter={adapter.name}{of})"
    warning = None if from_scratch else _warning(value, adapter.name, optimizer.scale_lr, ratio)
    return LearningRate(value, sentence, warning)


def _warning(value: float, method: str, scale_lr: str, ratio: float) -> str | None:
    lowest, highest = (bound * ratio for bound in USUAL_LR[method])
    if lowest / FAR <= value <= highest * FAR:
        return None
    factor, where = (value / highest, "above") if value > highest else (lowest / value, "below")
    unscaled = "" if scale_lr == "none" else " optimizer.scale_lr=none"
    return (
        f"warning: learning rate {format_lr(value)} is {factor:.0f} times {where} the usual range "
        f"of adapter={method} ({format_lr(lowest)} to {format_lr(highest)}); "
        f"type optimizer.lr={format_lr(DEFAULT_LR[method] * ratio)}{unscaled} if that is not "
        "intended"
    )


def format_lr(lr: float) -> str:
    """Format a learning rate as 2e-4 or 5.66e-4; from 0.01 up as a plain number."""
    if lr >= 0.01 or lr == 0:
        return f"{lr:.3g}"
    mantissa, exponent = f"{lr:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
