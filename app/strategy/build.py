"""Name -> Lightning strategy. The only place that knows how ranks talk to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy

NAMES = ("auto", "single", "ddp")


@dataclass(kw_only=True, slots=True)
class StrategyConfig:
    name: str = "auto"
    """auto: `single` on one device, `ddp` on several; ddp: every rank holds all weights"""


def build_strategy(config: StrategyConfig, num_ranks: int) -> Strategy | str:
    """Build the strategy that `num_ranks` processes train under."""
    name = config.name
    if name == "auto":
        name = "ddp" if num_ranks > 1 else "single"
    if name == "single":
        return "auto"  # Lightning's SingleDeviceStrategy, placed on the accelerator it finds
    from lightning.pytorch.strategies import DDPStrategy

    return DDPStrategy(gradient_as_bucket_view=True)
