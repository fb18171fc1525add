"""Estimate the host memory and the disk space that a run takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from app.planning.states import (
    ModelSize,
    feedback_bytes,
    num_shards,
    optimizer_state_bytes,
    outer_state_bytes,
)
from app.strategy.settings import (
    DdpConfig,
    FsdpConfig,
    LocalSgdConfig,
    ZeroConfig,
    shards_weights,
)

if TYPE_CHECKING:
    from app.planning.memory import PlannedRun


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """Host memory of one machine, in bytes."""

    loading: float
    """while the base is loaded: one copy per node if weights are sharded over the GPUs"""
    offloaded: float
    """weights, gradients, optimizer states or layer inputs that are offloaded"""

    @property
    def total(self) -> float:
        """The larger of the memory for loading and for training."""
        return max(self.loading, self.offloaded)


def estimate_host_memory(run: PlannedRun) -> HostMemory:
    """Estimate a machine's host memory, without what the processes themselves take."""
    size = _with_all_experts(run)
    whole, strategy = size.whole, run.strategy
    per_node, nodes = run.hardware.gpus_per_node, run.num_nodes
    on_disk = strategy.offload_optimizer == "disk"
    all_states = whole.trained + (0.0 if on_disk else _state_bytes(run, size))
    loading = offloaded = 0.0
    if shards_weights(strategy):
        loading = whole.total * run.tensor_size
    if run.stream == "host":
        loading, offloaded = whole.total, size.layer.frozen * size.num_layers
    if isinstance(strategy, FsdpConfig) and strategy.offload_parameters:
        _, _, shares = num_shards(strategy, run.num_ranks, nodes)
        offloaded += (whole.total + all_states) / shares * per_node
    if isinstance(strategy, ZeroConfig):
        if strategy.offload_optimizer != "none":
            offloaded += (all_states + whole.trained) / nodes
        if strategy.offload_parameters != "none":
            offloaded += whole.total / nodes
    if run.recompute == "offload":
        widths = run.model.widths
        layer_input = run.execution.tokens * widths.hidden * run.execution.residual_bytes
        offloaded += layer_input * widths.layers * per_node
    return HostMemory(loading=loading, offloaded=offloaded)


def _with_all_experts(run: PlannedRun) -> ModelSize:
    """Return the sizes of a model of which no rank has a part of the experts."""
    if isinstance(run.strategy, FsdpConfig) and run.expert_size > 1:
        return replace(run, strategy=replace(run.strategy, expert_parallel_size=1)).size
    return run.size


def _state_bytes(run: PlannedRun, size: ModelSize) -> float:
    outer = size.whole.num_trained * outer_state_bytes(run.strategy)
    return outer + optimizer_state_bytes(size, run.optimizer)


def estimate_disk(run: PlannedRun) -> float:
    """Estimate the bytes of all checkpoints, of the result, and of a machine's states on disk.

    While a checkpoint is written, there is one more than are kept.
    """
    size = _with_all_experts(run)
    split = run.tensor_size
    trained = size.whole.trained * split
    checkpoint = trained + _state_bytes(run, size) * split
    if isinstance(run.strategy, LocalSgdConfig):  # the mean, and the state of each node
        checkpoint *= 1 + (run.strategy.replicas or run.num_nodes)
    if isinstance(run.strategy, DdpConfig) and run.strategy.compression == "topk":
        checkpoint += run.num_ranks * feedback_bytes(size, run.strategy)  # of each rank
    result = trained + (size.whole.frozen if run.trains_base else 0.0)
    result += estimate_disk_states(run)
    return checkpoint * (run.num_checkpoints + 1) + result


def estimate_disk_states(run: PlannedRun) -> float:
    """Estimate the bytes of a machine's optimizer states that are on a disk."""
    if run.strategy.offload_optimizer != "disk":
        return 0.0
    _, _, shares = num_shards(run.strategy, run.num_ranks, run.num_nodes)
    return _state_bytes(run, _with_all_experts(run)) / shares * run.hardware.gpus_per_node
