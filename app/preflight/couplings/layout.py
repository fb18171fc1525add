"""How ranks divide what they share: the GPUs, the matrices, the replicas, the global batch."""

from __future__ import annotations

from typing import Any

from app.preflight.couplings.situation import has_setting
from app.strategy.settings import tensor_parallel_size


def check_devices(trainer: Any, num_gpus: int | None) -> list[str]:
    """Compare trainer.devices with the GPUs that are there; None where the run is on the CPU."""
    if not num_gpus or trainer.devices == "auto" or trainer.devices <= num_gpus:
        return []
    there = f"{num_gpus} GPU{'s' * (num_gpus != 1)}"
    return [
        f"trainer.devices={trainer.devices}, but this machine has {there}; "
        f"type trainer.devices={num_gpus}"
    ]


def check_layout(strategy: Any, trainer: Any, ranks_per_node: int) -> list[str]:
    """Say by what the ranks cannot be divided into those that split matrices, and into replicas."""
    if not has_setting(strategy, "tensor_parallel_size"):
        return []
    size = tensor_parallel_size(strategy, ranks_per_node)
    ranks = ranks_per_node * trainer.num_nodes
    if ranks % size:
        fits = [str(n) for n in range(2, ranks + 1) if ranks % n == 0 and n <= ranks_per_node]
        fitting = f"strategy.tensor_parallel_size={' or '.join(fits)}" if fits else "strategy=ddp"
        return [
            f"strategy.tensor_parallel_size={size} does not divide {ranks} rank"
            f"{'s' * (ranks != 1)} ({ranks} / {size} leaves {ranks % size}); type {fitting}, or "
            f"trainer.devices={size}"
        ]
    groups, replicas = ranks // size, strategy.replicas or trainer.num_nodes
    if groups % replicas == 0 or not strategy.shards_data_parallel:
        return []
    fits = [str(n) for n in range(1, groups + 1) if groups % n == 0]
    return [
        f"strategy.replicas={replicas} does not divide {groups} ranks that see data of their own "
        f"({groups} / {replicas} leaves {groups % replicas}); type strategy.replicas="
        f"{' or '.join(fits)}"
    ]


def check_global_batch(
    trainer: Any, num_ranks: int, num_data_ranks: int | None = None
) -> list[str]:
    """Say by what trainer.global_batch_size cannot be divided among ranks and micro-batches.

    `num_data_ranks`: ranks, or groups of ranks, that see data of their own; all when not given.
    """
    groups = num_ranks if num_data_ranks is None else num_data_ranks
    total, packs = trainer.global_batch_size, trainer.micro_batch_size * groups
    if total is None or total % packs == 0:
        return []
    fits = [str(fit) for fit in (total // packs * packs, total // packs * packs + packs) if fit]
    together = num_ranks // groups
    who = f"{groups} ranks"
    if together > 1:
        who = f"{groups} groups of ranks ({num_ranks} ranks / {together} that split a matrix)"
    return [
        f"trainer.global_batch_size={total} is no multiple of micro_batch_size "
        f"{trainer.micro_batch_size} x {who} = {packs}; "
        f"type trainer.global_batch_size={' or '.join(fits)}"
    ]
