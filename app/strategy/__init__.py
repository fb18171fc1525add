"""Strategies: one device, DDP, DeepSpeed ZeRO, FSDP2, tensor parallelism, local SGD."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from app.strategy.settings import (
    DdpConfig,
    FsdpConfig,
    LocalSgdConfig,
    PipelineConfig,
    StrategyConfig,
    ZeroConfig,
    context_parallel_size,
)

if TYPE_CHECKING:
    from app.strategy.mixin import StrategyMixin


def build_strategy(
    config: StrategyConfig,
    *,
    accelerator: str,
    num_ranks: int,
    accumulation: int = 1,
    stages: Sequence[tuple[int, int]] = (),
) -> StrategyMixin:
    """Build the strategy for `num_ranks` processes; `auto` must already be resolved.

    `accumulation`: micro-batches of a rank's optimizer step. `stages`: layers [first, stop) of each
    stage of a pipeline.
    """
    from app.strategy.rendezvous import use_separate_store

    use_separate_store()
    if isinstance(config, PipelineConfig):
        from app.strategy.pipeline import Pipeline

        return Pipeline(config, stages)
    strategy = _build_family(config, accelerator, num_ranks, accumulation)
    strategy.context_size = context_parallel_size(config)
    return strategy


def _build_family(
    config: StrategyConfig, accelerator: str, num_ranks: int, accumulation: int
) -> StrategyMixin:
    from app.strategy.ddp import CompressedDdp, Ddp, SingleDevice

    if isinstance(config, ZeroConfig):
        from app.strategy.deepspeed import build_zero

        return build_zero(config, accelerator=accelerator, accumulation=accumulation)
    if isinstance(config, LocalSgdConfig):
        from app.strategy.local_sgd import LocalSgd, SiteSgd

        return SiteSgd(config) if config.sites > 1 else LocalSgd(config)
    if isinstance(config, FsdpConfig):
        from app.strategy.fsdp import Fsdp

        return Fsdp(config)
    if isinstance(config, DdpConfig) and config.compression != "none":
        return CompressedDdp(config)
    if isinstance(config, DdpConfig) or num_ranks > 1:
        return Ddp()
    return SingleDevice("cuda:0" if accelerator == "gpu" else "cpu")
