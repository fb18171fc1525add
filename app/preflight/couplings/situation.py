"""What a row of the table is, and the situation that it judges: settings on a machine."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.strategy.settings import tensor_parallel_size


@dataclasses.dataclass(frozen=True, slots=True)
class Situation:
    """The settings, and what follows from them on this machine."""

    config: Any
    """TrainConfig or EvaluateConfig (made by the door, which stands above this room)"""
    num_gpus: int

    @property
    def on_gpu(self) -> bool:
        accelerator = self.config.trainer.accelerator
        return accelerator == "gpu" or (accelerator == "auto" and self.num_gpus > 0)

    @property
    def device(self) -> str:
        """The device as a person would say it."""
        if self.on_gpu:
            return f"{self.num_gpus} GPU{'s' * (self.num_gpus != 1)}"
        return "the CPU" if self.num_gpus else "the CPU (no GPU was found)"

    @property
    def num_ranks(self) -> int:
        return self.ranks_per_node * int(self.config.trainer.num_nodes)

    @property
    def ranks_per_node(self) -> int:
        devices = self.config.trainer.devices
        if isinstance(devices, int):
            return devices
        return max(self.num_gpus, 1) if self.on_gpu else 1

    @property
    def num_data_ranks(self) -> int:
        """Ranks, or groups of ranks, that see data of their own."""
        size = tensor_parallel_size(self.config.strategy, self.ranks_per_node)
        return max(self.num_ranks // size, 1)


@dataclasses.dataclass(frozen=True, slots=True)
class Coupling:
    """One row: when it does not go together, why, and what to type instead."""

    reads: str
    """the settings that it reads; a row is skipped where one of them does not exist"""
    clashes: Callable[[Situation], bool]
    why: Callable[[Situation], str]
    instead: Callable[[Situation], str]
    is_of_machine: bool = False
    """whether another machine would change the answer"""


def find_situation(config: Any, num_gpus: int | None = None) -> Situation:
    """Put the settings on a machine with `num_gpus` GPUs; on this one when not given."""
    return Situation(config, count_gpus() if num_gpus is None else num_gpus)


def num_ranks(config: Any) -> int | None:
    """Return how many ranks the settings ask for; None for a verb that runs as one process."""
    if not has_setting(config, "trainer.devices"):
        return None
    return find_situation(config).num_ranks


def ranks_per_node(config: Any) -> int:
    """Return how many ranks of a training the settings ask for on each machine."""
    return find_situation(config).ranks_per_node


def num_data_ranks(config: Any) -> int | None:
    """Return how many ranks, or groups of them, see data of their own; as `num_ranks` else."""
    if not has_setting(config, "trainer.devices"):
        return None
    return find_situation(config).num_data_ranks


def count_gpus() -> int:
    """Count the NVIDIA devices that this process may use, by their device files."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = sum(file.name[len("nvidia") :].isdigit() for file in Path("/dev").glob("nvidia*"))
    present = present or int(Path("/dev/dxg").exists())  # Windows' GPU under WSL
    if visible is None:
        return present
    chosen = [name.strip() for name in visible.split(",") if name.strip()]
    # CUDA ignores everything from the first invalid index on.
    until = chosen.index("-1") if "-1" in chosen else len(chosen)
    return min(until, present) if present else 0


def has_setting(config: Any, key: str) -> bool:
    """Say whether the verb and the options that were chosen have the setting `key`."""
    for name in key.split("."):
        if name not in {field.name for field in dataclasses.fields(config)}:
            return False
        config = getattr(config, name)
    return True
