"""Which strategy a run uses, and why: `auto` chosen by rules of thumb, a name built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.strategy.rendezvous import use_new_store_after_restart
from app.strategy.settings import DdpConfig, FsdpConfig, StrategyConfig, ZeroConfig

if TYPE_CHECKING:
    from app.strategy.mixin import StrategyMixin

FOR_STATES = 0.75
"""share of a device's memory that weights, gradients and optimizer states may take"""
STORED = "stored"
"""how a base is quantized whose files hold few bits already, whichever they are"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What the choice depends on; sizes are of the whole model."""

    num_ranks: int
    num_nodes: int = 1
    device_gib: float | None = None
    """memory of the smallest GPU; None on a CPU"""
    weights_gib: float = 0.0
    """all weights, as they are kept while training"""
    states_gib: float = 0.0
    """gradients and optimizer states of what trains"""
    quantization: str = "none"
    """a method's name, or STORED"""
    has_fast_links: bool = False
    """whether nodes are joined by InfiniBand or its like"""
    has_deepspeed: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """A strategy by its name, and why."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}, because {self.reason}"


def choose_strategy(facts: Facts) -> Choice:
    """Choose a strategy that holds what the facts say, with as little traffic as it can."""
    if facts.num_ranks == 1:
        return Choice("single", "there is one rank")
    if facts.device_gib is None:
        return Choice("ddp", f"{facts.num_ranks} ranks on a CPU share its memory")
    if facts.quantization == STORED:
        return Choice("ddp", "the base's files are quantized, and what they hold cannot be spread")
    room = FOR_STATES * facts.device_gib
    kept = facts.weights_gib + facts.states_gib
    per_node = facts.num_ranks // facts.num_nodes
    size = (
        f"weights, gradients and optimizer states take {kept:.1f} GiB, and {room:.0f} of a GPU's "
        f"{facts.device_gib:.0f} GiB are for them"
    )
    if kept <= room:
        return Choice("ddp", f"each GPU holds all: {size}")
    if facts.quantization == "int8":
        return _choose_for_int8(facts, size)
    if kept > room * facts.num_ranks:
        return _choose_beyond_all(facts, size)
    if facts.num_nodes > 1 and not facts.has_fast_links:
        slow = "the links between nodes are slow (no InfiniBand was found)"
        if kept <= room * per_node:
            return Choice("fsdp_hybrid", f"a node's {per_node} GPUs hold all, and {slow}: {size}")
        # A second copy of the weights is spread inside each node, and serves the backward pass.
        beside = facts.weights_gib / per_node + kept / facts.num_ranks
        if beside <= room and facts.has_deepspeed and facts.quantization == "none":
            return Choice(
                "zero3_hpz", f"no node holds all, though each holds the weights, and {slow}: {size}"
            )
        return Choice("fsdp", f"it takes all {facts.num_ranks} GPUs to hold it: {size}")
    spread = facts.weights_gib + facts.states_gib / facts.num_ranks
    if spread <= room and facts.quantization == "none":
        return Choice(
            "fsdp_grad_op", f"a GPU holds the weights, not all of their states beside them: {size}"
        )
    where = "a node" if facts.num_nodes == 1 else f"{facts.num_nodes} nodes with fast links"
    return Choice("fsdp", f"no GPU holds all, and the {facts.num_ranks} of {where} do: {size}")


def _choose_for_int8(facts: Facts, size: str) -> Choice:
    why = f"weights in int8 cannot be spread (those of quantization=nf4 can): {size}"
    if facts.has_deepspeed:
        return Choice("zero2", f"only optimizer states can be spread; {why}")
    return Choice("ddp", why)


def _choose_beyond_all(facts: Facts, size: str) -> Choice:
    if facts.quantization == "none":
        return Choice(
            "fsdp_offload", f"not even all {facts.num_ranks} GPUs hold it, host memory may: {size}"
        )
    return Choice("fsdp", f"nothing spreads more, though it will be tight: {size}")


def build_strategy(config: StrategyConfig, *, accelerator: str, num_ranks: int) -> StrategyMixin:
    """Build the strategy that `num_ranks` processes train under; `auto` is resolved before."""
    from app.strategy.ddp import Compressed, OneDevice, Replicated

    use_new_store_after_restart()
    if isinstance(config, ZeroConfig):
        from app.strategy.deepspeed import build_zero

        return build_zero(config, accelerator=accelerator)
    if isinstance(config, FsdpConfig):
        from app.strategy.fsdp import build_sharded

        return build_sharded(config, accelerator=accelerator, num_ranks=num_ranks)
    if isinstance(config, DdpConfig) and config.compression != "none":
        return Compressed(config, gradient_as_bucket_view=True)
    if isinstance(config, DdpConfig) or num_ranks > 1:
        return Replicated(gradient_as_bucket_view=True)
    return OneDevice("cuda:0" if accelerator == "gpu" else "cpu")
