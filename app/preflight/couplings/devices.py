"""Requested devices and ranks, and whether batches and shards divide by them."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any, TypeGuard

from app.process.gpus import find_gpu_problems, num_device_files, num_visible, read_machine
from app.strategy.settings import (
    FsdpConfig,
    StrategyConfig,
    context_parallel_size,
    divisors,
    expert_parallel_size,
    pipeline_parallel_size,
    ranks_per_row,
    tensor_parallel_size,
)
from common.errors import DeviceError
from common.text import counted

if TYPE_CHECKING:
    from app.config.verbs import EvaluateConfig, MergeConfig, TrainConfig, TunedConfig
    from app.training.trainer import TrainerConfig


MAX_CPU_RANKS = 64
"""most ranks of one machine without GPUs, if it has fewer cores"""


@dataclasses.dataclass(frozen=True, slots=True)
class Devices:
    """The devices and ranks that the settings request, on a machine with `num_gpus` GPUs."""

    num_gpus: int
    on_gpu: bool
    ranks_per_node: int
    num_ranks: int
    num_data_ranks: int
    """ranks with different data; with tensor or context parallelism, groups of ranks"""

    def __str__(self) -> str:
        if self.on_gpu:
            return counted(self.num_gpus, "GPU")
        return "the CPU" if self.num_gpus else "the CPU (no GPU was found)"


def requested_devices(config: TrainConfig | TunedConfig, num_gpus: int | None = None) -> Devices:
    """Return the requested devices and ranks; the GPUs of this machine are counted if not given."""
    num_gpus = count_gpus() if num_gpus is None else num_gpus
    accelerator = config.trainer.accelerator
    on_gpu = accelerator == "gpu" or (accelerator == "auto" and num_gpus > 0)
    if not has_data(config):
        return Devices(num_gpus, on_gpu, 1, 1, 1)
    per_node = config.trainer.devices
    if not isinstance(per_node, int):
        per_node = max(num_gpus, 1) if on_gpu else 1
    if not is_training(config):
        return Devices(num_gpus, on_gpu, per_node, per_node, per_node)
    num_ranks = per_node * config.trainer.nodes
    together = ranks_per_row(config.strategy, per_node)
    return Devices(num_gpus, on_gpu, per_node, num_ranks, max(num_ranks // together, 1))


def splits_matrices(config: Any, devices: Devices) -> bool:
    """Return whether the ranks of a training run split each layer's matrices."""
    return tensor_parallel_size(config.strategy, devices.ranks_per_node) > 1


# The classes of the settings belong to app.config, which imports this package.


def is_training(config: TrainConfig | TunedConfig) -> TypeGuard[TrainConfig]:
    """Return whether these are the settings of a training run, its preview or its plan."""
    return "optimizer" in config.__dataclass_fields__


def is_on_tuned(config: TrainConfig | TunedConfig) -> TypeGuard[TunedConfig]:
    """Return whether these are the settings of a verb that uses a trained model."""
    return not is_training(config)


def has_data(config: TrainConfig | TunedConfig) -> TypeGuard[TrainConfig | EvaluateConfig]:
    """Return whether these are the settings of a verb that reads data."""
    return "data" in config.__dataclass_fields__


def is_merge(config: TrainConfig | TunedConfig) -> TypeGuard[MergeConfig]:
    """Return whether these are the settings of a merge."""
    return "merge" in config.__dataclass_fields__


def count_gpus() -> int:
    """Count the NVIDIA devices that this process may use, by their device files."""
    return num_visible(os.environ.get("CUDA_VISIBLE_DEVICES"), num_device_files())


def check_gpus(config: TrainConfig | TunedConfig) -> None:
    """Check that the requested GPUs can be used; DeviceError if they cannot.

    Called before any rank starts: all of them would fail, and none may train on the CPU instead.
    """
    if config.trainer.accelerator == "cpu":
        return
    wanted = requested_devices(config).ranks_per_node
    problems = find_gpu_problems(
        read_machine(),
        wanted,
        config.trainer.precision,
        computes_in_fp8=config.quantization.method == "fp8",
    )
    if problems:
        raise DeviceError(problems)


def check_devices(trainer: TrainerConfig, num_gpus: int | None) -> list[str]:
    """Check that the machine has trainer.devices GPUs; `num_gpus` is None for a run on the CPU."""
    if isinstance(trainer.devices, str):
        return []
    if num_gpus is None:
        cores = os.cpu_count() or 1
        most = max(MAX_CPU_RANKS, cores)
        return [
            f"trainer.devices={trainer.devices}, but each rank is a process, and this machine has "
            f"{cores} cores; type trainer.devices={cores} or fewer"
        ] * (trainer.devices > most)
    if not num_gpus or trainer.devices <= num_gpus:
        return []
    return [
        f"trainer.devices={trainer.devices}, but this machine has {counted(num_gpus, 'GPU')}; type "
        f"trainer.devices={num_gpus}"
    ]


def indivisible(name: str, size: int, count: int, what: str, fits: list[int], *others: str) -> str:
    """Say that strategy.`name`=`size` does not divide `what`, and which numbers would.

    `count`: the number in `what`. `others`: what to type instead of one of `fits`.
    """
    typed = (f"strategy.{name}={' or '.join(map(str, fits))}",) if fits else ()
    return (
        f"strategy.{name}={size} does not divide {what} ({count} / {size} leaves {count % size}); "
        f"type {', or '.join(typed + others)}"
    )


def check_layout(
    strategy: StrategyConfig, trainer: TrainerConfig, ranks_per_node: int
) -> list[str]:
    """Check that the ranks divide into groups that split rows or matrices, those into replicas."""
    ranks, pipe = ranks_per_node * trainer.nodes, pipeline_parallel_size(strategy)
    for name, split, least in (
        ("context_parallel_size", context_parallel_size(strategy), 1),
        ("expert_parallel_size", expert_parallel_size(strategy), 1),
        ("pipeline_parallel_size", pipe, 2),
    ):
        if ranks % split:
            what, devices = counted(ranks, "rank"), f"trainer.devices={split}"
            return [indivisible(name, split, ranks, what, divisors(ranks, least), devices)]
    if not isinstance(strategy, FsdpConfig):
        return []
    ranks //= pipe
    name, size = "tensor_parallel_size", tensor_parallel_size(strategy, ranks_per_node)
    if ranks % size:
        fits = [each for each in divisors(ranks, 2) if each <= ranks_per_node]
        others = (*(() if fits else ("strategy=ddp",)), f"trainer.devices={size}")
        return [indivisible(name, size, ranks, counted(ranks, "rank"), fits, *others)]
    groups, replicas = ranks // size, strategy.replicas or trainer.nodes
    if groups % replicas == 0 or not strategy.shards_data_parallel:
        return []
    what = f"{groups} data-parallel ranks"
    return [indivisible("replicas", replicas, groups, what, divisors(groups))]


def check_global_batch(
    trainer: TrainerConfig, num_ranks: int, num_data_ranks: int | None = None
) -> list[str]:
    """Check that trainer.global_batch_size is a multiple of the micro-batches of all ranks.

    `num_data_ranks`: ranks (or tensor-parallel groups) with different data; all if not given.
    """
    total = trainer.global_batch_size
    if total is None:
        return []
    groups = num_ranks if num_data_ranks is None else num_data_ranks
    packs = trainer.least_micro_batch * groups
    if total % packs == 0:
        return []
    fits = [str(fit) for fit in (total // packs * packs, total // packs * packs + packs) if fit]
    together = num_ranks // groups
    who = f"{groups} ranks"
    if together > 1:
        who = f"{groups} groups of ranks ({num_ranks} ranks / {together} that get the same rows)"
    return [
        f"trainer.global_batch_size={total} is not a multiple of micro_batch_size "
        f"{trainer.least_micro_batch} x {who} = {packs}; "
        f"type trainer.global_batch_size={' or '.join(fits)}"
    ]
