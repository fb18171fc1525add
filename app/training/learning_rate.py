"""The peak learning rate of a run: what is typed or usual, scaled by the batch, and looked at."""

from __future__ import annotations

import math
from dataclasses import dataclass

from app.model.adapter import DEFAULT_LR, AdapterConfig
from app.training.optimizers import OptimizerConfig

USUAL_LR = {
    # Lowest and highest of what published recipes use: 1e-5 for LoRA on a 70B model (axolotl),
    # 5e-5 for full fine-tuning (transformers' default), 3e-3 for IA3 (arXiv 2205.05638).
    "lora": (1e-5, 5e-4),
    "ia3": (1e-3, 1e-2),
    "freeze": (1e-6, 5e-5),
    "full": (1e-6, 5e-5),
}
FAR = 10.0
"""outside the usual range by more than this factor is worth a warning; tiny models need less"""


@dataclass(frozen=True, slots=True)
class LearningRate:
    """The peak learning rate, and what is to be said of it."""

    value: float
    sentence: str
    """where the value comes from, with the sum written out where it was scaled"""
    warning: str | None


def resolve_lr(
    optimizer: OptimizerConfig,
    adapter: AdapterConfig,
    global_batch_size: int,
    *,
    from_scratch: bool,
) -> LearningRate:
    """Resolve the peak learning rate of a run.

    `global_batch_size`: packs (rows when not packing) an optimizer step over all ranks. Models
    trained from scratch have no usual range here.
    """
    start = DEFAULT_LR[adapter.name] if optimizer.lr is None else optimizer.lr
    value, sentence = start, f"lr {written(start)}"
    if optimizer.scale_lr != "none":
        ratio = global_batch_size / optimizer.base_batch_size
        factor = f"{global_batch_size} / {optimizer.base_batch_size}"
        if optimizer.scale_lr == "sqrt":
            value, factor = start * math.sqrt(ratio), f"sqrt({factor})"
        else:
            value, factor = start * ratio, f"({factor})"
        sentence = f"lr {written(start)} x {factor} = {written(value)}"
    if optimizer.lr is None:
        sentence += f" ({written(start)} is the default of adapter={adapter.name})"
    warning = None if from_scratch else _warning(value, adapter.name, optimizer.scale_lr)
    return LearningRate(value, sentence, warning)


def _warning(value: float, method: str, scale_lr: str) -> str | None:
    lowest, highest = USUAL_LR[method]
    if lowest / FAR <= value <= highest * FAR:
        return None
    factor, where = (value / highest, "above") if value > highest else (lowest / value, "below")
    unscaled = "" if scale_lr == "none" else " optimizer.scale_lr=none"
    return (
        f"warning: learning rate {written(value)} is {factor:.0f} times {where} what is usual for "
        f"adapter={method} ({written(lowest)} to {written(highest)}); "
        f"type optimizer.lr={written(DEFAULT_LR[method])}{unscaled} if that is not on purpose"
    )


def written(lr: float) -> str:
    """Write a learning rate as people do: 2e-4, 5.66e-4; from 0.01 up as a plain number."""
    if lr >= 0.01 or lr == 0:
        return f"{lr:.3g}"
    mantissa, exponent = f"{lr:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
