"""Measure what a run takes of its machine, beside its metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L

from app.training.machine import MachineWatch, watch_gpu


class WatchMachine(L.Callback):
    """Measure on the first rank, from the first step on.

    `tokens_at_full_rate`: tokens a second of all GPUs, were each FLOP of their datasheet one of the
    model's; None where that is not known.
    """

    def __init__(self, folder: Path, tokens_at_full_rate: float | None = None) -> None:
        self.folder, self.tokens_at_full_rate = folder, tokens_at_full_rate

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Begin, before the first row is written."""
        if not trainer.is_global_zero:
            return
        profiler: Any = trainer.profiler
        device = trainer.strategy.root_device
        machine = MachineWatch(
            self.folder,
            lambda: float(profiler.clock.seconds),
            gpu=watch_gpu(device.index or 0) if device.type == "cuda" else None,
            tokens_at_full_rate=self.tokens_at_full_rate,
        )
        pl_module.metrics.add_machine(machine)
