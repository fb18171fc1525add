"""Settings of the strategies, by family; imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from data_modules import setting

HOMES = ("none", "cpu")
"""where states may be offloaded: nowhere, to host memory"""
TIMEOUT = timedelta(minutes=30)
"""that ranks wait for each other in one collective, under every strategy: longer than one of them
reads or writes a large model, while the others wait. A run that hangs in training is found earlier,
by supervise.hang_minutes"""
MAX_UNSHARDED_SHARE = 0.1
"""trainable share of a model up to which FSDP's gradients stay unsharded between micro-batches"""


@dataclass(kw_only=True, slots=True)
class StrategyConfig:
    name: str = setting("auto", resume="content")
    """the option that was chosen; auto chooses one and says why"""


@dataclass(kw_only=True, slots=True)
class DdpConfig(StrategyConfig):
    """Every rank holds all weights; gradients are averaged."""

    name: str = setting("ddp", resume="content")
    compression: str = setting("none", choices=("none", "bf16", "fp16", "powersgd", "topk"))
    """how gradients travel: none, bf16, fp16 (half the bytes), powersgd (low rank, far fewer), topk
    (the largest of each weight; what is left out is added to the next step's)"""
    powersgd_rank: int = setting(4, ge=1, note="1 to 32 is usual")
    """rank of PowerSGD's approximation; higher = more exact, more bytes"""
    topk_share: float = setting(0.01, gt=0, le=1, note="0.001 to 0.05 is usual")
    """share of a weight's gradients that topk sends; higher = more exact, more bytes"""


@dataclass(kw_only=True, slots=True)
class ZeroConfig(StrategyConfig):
    """DeepSpeed ZeRO: what is spread over the ranks grows with the stage."""

    name: str = setting("zero3", resume="content")
    stage: int = setting(3, choices=(1, 2, 3))
    """1: optimizer states, 2: gradients too, 3: weights too"""
    offload_optimizer: str = setting("none", choices=HOMES)
    """where optimizer states are kept and stepped: none (the device), cpu"""
    offload_parameters: str = setting("none", choices=HOMES)
    """where weights wait for their turn: none (the device), cpu; stage 3"""
    partition_within_node: bool = False
    """ZeRO++ hpZ: keep a second copy of the weights sharded inside each node, from which the
    backward pass gathers them; more memory, less traffic between nodes"""
    quantized_weights: bool = False
    """ZeRO++ qwZ: weights travel in 8 bits"""
    quantized_gradients: bool = False
    """ZeRO++ qgZ: gradients travel in 4 bits between nodes"""
    config: dict[str, Any] = field(default_factory=dict)
    """further keys of a DeepSpeed config, but none that another setting stands for"""


@dataclass(kw_only=True, slots=True)
class FsdpConfig(StrategyConfig):
    """PyTorch's own sharding (FSDP2), tensor parallelism, or both."""

    name: str = setting("fsdp", resume="content")
    reshard_after_forward: bool = True
    """free a layer's weights after its forward pass and gather them again for the backward; false
    is ZeRO-2's trade: more memory, less traffic"""
    replicas: int | None = setting(1, ge=1, note="null: one a node")
    """groups of ranks that each hold all weights (hybrid sharding); null = one a node"""
    offload_parameters: bool = False
    """keep weights, gradients and optimizer states in pinned host memory; GPU only"""
    tensor_parallel_size: int | None = setting(1, ge=1, note="null: all of a node")
    """ranks that split each layer's matrices and see the same data; null = all of a node"""
    shards_data_parallel: bool = True
    """false: weights are only split by tensor parallelism"""


@dataclass(kw_only=True, slots=True)
class LocalSgdConfig(FsdpConfig):
    """FSDP2 within each node; nodes train apart and average their weights every few steps."""

    name: str = setting("hsdp_local_sgd", resume="content")
    replicas: int | None = setting(None, ge=1, note="null: one a node")
    """groups of ranks that train apart; null = one a node"""
    sync_every_steps: int = setting(8, ge=1, resume="fixed", note="4 to 100 is usual")
    """optimizer steps between two averages of the trained weights; more = fewer bytes between
    nodes, further from synchronous training"""
    synchronous_steps: int = setting(10, ge=0, resume="fixed")
    """optimizer steps at the start of a run in which nodes average gradients, as fsdp_hybrid"""
    outer_lr: float = setting(
        1.0, gt=0, resume="fixed", note="0.7 with outer_momentum=0.9 is DiLoCo"
    )
    """rate of the step that is taken towards the average; 1 without momentum ends at the average"""
    outer_momentum: float = setting(0.0, ge=0, lt=1, resume="fixed")
    """Nesterov momentum of these steps; above 0 (or with another outer_lr) takes memory for two
    copies of the trained weights"""

    @property
    def uses_outer_optimizer(self) -> bool:
        """Whether nodes end anywhere but at their average."""
        return self.outer_lr != 1 or self.outer_momentum > 0


FAMILIES: dict[str, type[StrategyConfig]] = {
    "auto": StrategyConfig,
    "single": StrategyConfig,
    "ddp": DdpConfig,
    "ddp_compressed": DdpConfig,
    "zero1": ZeroConfig,
    "zero2": ZeroConfig,
    "zero3": ZeroConfig,
    "zero2_offload": ZeroConfig,
    "zero3_offload": ZeroConfig,
    "zero3_nvme": ZeroConfig,
    "zero3_hpz": ZeroConfig,
    "zeropp": ZeroConfig,
    "fsdp": FsdpConfig,
    "fsdp_grad_op": FsdpConfig,
    "fsdp_hybrid": FsdpConfig,
    "fsdp_offload": FsdpConfig,
    "hsdp_local_sgd": LocalSgdConfig,
    "tp": FsdpConfig,
    "fsdp_tp": FsdpConfig,
}
"""settings class of each name; values are in conf/strategy"""


def is_sharding(config: StrategyConfig) -> bool:
    """Return whether weights or optimizer states are sharded."""
    return isinstance(config, (ZeroConfig, FsdpConfig))


def tensor_parallel_size(config: StrategyConfig, ranks_per_node: int) -> int:
    """Return the number of ranks that split each layer's matrices and see the same data."""
    if not isinstance(config, FsdpConfig):
        return 1
    return config.tensor_parallel_size or ranks_per_node
