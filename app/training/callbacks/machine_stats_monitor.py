"""Log data wait, memory, disk and utilization of the machine with the training metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L

from app.training.machine import MachineStats, open_gpu_stats


class MachineStatsMonitor(L.Callback):
    """Measure the machine of rank 0, from the first step on.

    `peak_tokens_per_second`: training throughput of all GPUs if every FLOP of their datasheets
    were one of the model's; None if it is not known.
    """

    def __init__(self, folder: Path, peak_tokens_per_second: float | None = None) -> None:
        self.folder, self.peak_tokens_per_second = folder, peak_tokens_per_second

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Start before the first row of metrics is written."""
        if not trainer.is_global_zero:
            return
        profiler: Any = trainer.profiler
        device = trainer.strategy.root_device
        machine = MachineStats(
            self.folder,
            lambda: float(profiler.seconds),
            gpu=open_gpu_stats(device.index or 0) if device.type == "cuda" else None,
            peak_tokens_per_second=self.peak_tokens_per_second,
        )
        pl_module.metrics.add_machine(machine)
