"""When checkpoints are written and how many are kept."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    every_steps: int | None = None
    """optimizer steps between checkpoints; null = ten times a run, and once an epoch of the data;
    one more at the end"""
    keep_last: int = 2
    """newest checkpoints that are kept; more disk"""
    keep_best: int = 0
    """checkpoints of the lowest validation losses that are kept besides"""
    asynchronous: bool = False
    """write while training goes on, typed as trainer.checkpoint.async=true; one more copy of what
    trains in host memory"""
