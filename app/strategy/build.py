"""Which strategy a run uses, and why: `auto` chosen by rules of thumb, a name built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.strategy.rendezvous import use_new_store_after_restart
from app.strategy.settings import DdpConfig, FsdpConfig, StrategyConfig, ZeroConfig

if TYPE_CHECKING:
    from app.strategy.mixin import StrategyMixin

STATES_SHARE = 0.75
"""share of a device's memory that weights, gradients and optimizer states may take"""
STORED = "stored"
"""quantization of a base whose files are already quantized, by whatever method"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What the choice depends on; sizes are of the whole model."""

    num_ranks: int
    num_nodes: int = 1
    device_gib: float | None = None
    """memory of the smallest GPU; None on a CPU"""
    weights_gib: float = 0.0
    """all weights, in their training dtype"""
    states_gib: float = 0.0
    """gradients and optimizer states of the trainable parameters"""
    quantization: str = "none"
    """a method's name, or STORED"""
    has_fast_links: bool = False
    """whether nodes are joined by InfiniBand or its like"""
    has_deepspeed: bool = False


@dataclass(frozen=True, slots=True)
class StrategyChoice:
    """A strategy by its name, and why it was chosen."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


def choose_strategy(facts: Facts) -> StrategyChoice:
    """Choose the strategy with the least communication that fits the model into memory.

    Rules of thumb: activations are given the rest of a device's memory, whatever they need.
    """
    if facts.num_ranks == 1:
        return StrategyChoice("single", "1 process")
    if facts.device_gib is None:
        return StrategyChoice("ddp", f"{facts.num_ranks} processes on a CPU share its memory")
    if facts.quantization == STORED:
        return StrategyChoice(
            "ddp", "the base's files are quantized, and such weights cannot be sharded"
        )
    room = STATES_SHARE * facts.device_gib
    needed = facts.weights_gib + facts.states_gib
    per_node = facts.num_ranks // facts.num_nodes
    size = (
        f"weights, gradients and optimizer states take {needed:.1f} GiB, and {room:.0f} of a GPU's "
        f"{facts.device_gib:.0f} GiB are available for them"
    )
    if needed <= room:
        return StrategyChoice("ddp", f"each GPU holds all: {size}")
    if facts.quantization == "int8":
        return _choose_for_int8(facts, size)
    if needed > room * facts.num_ranks:
        return _choose_beyond_all(facts, size)
    if facts.num_nodes > 1 and not facts.has_fast_links:
        slow = "the links between nodes are slow (no InfiniBand was found)"
        if needed <= room * per_node:
            return StrategyChoice(
                "fsdp_hybrid", f"a node's {per_node} GPUs hold all, and {slow}: {size}"
            )
        # hpZ shards a second copy of the weights within each node, for the backward pass.
        with_copy = facts.weights_gib / per_node + needed / facts.num_ranks
        if with_copy <= room and facts.has_deepspeed and facts.quantization == "none":
            return StrategyChoice(
                "zero3_hpz", f"no node holds all, though each holds the weights, and {slow}: {size}"
            )
        return StrategyChoice("fsdp", f"it takes all {facts.num_ranks} GPUs to hold it: {size}")
    states_sharded = facts.weights_gib + facts.states_gib / facts.num_ranks
    if states_sharded <= room and facts.quantization == "none":
        return StrategyChoice(
            "fsdp_grad_op",
            f"a GPU holds the weights, but not their optimizer states as well: {size}",
        )
    where = "a node" if facts.num_nodes == 1 else f"{facts.num_nodes} nodes with fast links"
    return StrategyChoice(
        "fsdp", f"no GPU holds all, and the {facts.num_ranks} of {where} do: {size}"
    )


def _choose_for_int8(facts: Facts, size: str) -> StrategyChoice:
    why = f"weights in int8 cannot be sharded (those of quantization=nf4 can): {size}"
    if facts.has_deepspeed:
        return StrategyChoice("zero2", f"only optimizer states can be sharded; {why}")
    return StrategyChoice("ddp", why)


def _choose_beyond_all(facts: Facts, size: str) -> StrategyChoice:
    if facts.quantization == "none":
        return StrategyChoice(
            "fsdp_offload", f"not even all {facts.num_ranks} GPUs hold it, host memory may: {size}"
        )
    return StrategyChoice("fsdp", f"nothing shards more, though memory will be tight: {size}")


def build_strategy(config: StrategyConfig, *, accelerator: str, num_ranks: int) -> StrategyMixin:
    """Build the strategy of `num_ranks` processes; `auto` must be resolved before."""
    from app.strategy.ddp import Compressed, OneDevice, Replicated

    use_new_store_after_restart()
    if isinstance(config, ZeroConfig):
        from app.strategy.deepspeed import build_zero

        return build_zero(config, accelerator=accelerator)
    if isinstance(config, FsdpConfig):
        from app.strategy.fsdp import build_sharded

        return build_sharded(config, accelerator=accelerator, num_ranks=num_ranks)
    if isinstance(config, DdpConfig) and config.compression != "none":
        return Compressed(config)
    if isinstance(config, DdpConfig) or num_ranks > 1:
        return Replicated()
    return OneDevice("cuda:0" if accelerator == "gpu" else "cpu")
