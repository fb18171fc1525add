"""What `auto` becomes, and why: strategy, recompute and micro-batch, by what fits the hardware."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from app.model.recompute import BY_SPEED
from app.planning.hardware import FAST_NETWORK
from app.planning.memory import (
    GIB,
    GpuMemory,
    PlannedRun,
    estimate_gpu_memory,
    estimate_moments,
    fits,
    usable_bytes,
)
from app.strategy.settings import StrategyConfig
from app.training.memory import ModelSize
from app.training.micro_batch import can_try, divisors

UNTRIED_SHARE = 0.8
"""share of the room for activations that is taken where no micro-batch is tried"""


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen by its name, and why."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


@dataclass(frozen=True, slots=True)
class MicroBatchChoice:
    """A number of packs, and why it was chosen."""

    size: int
    reason: str

    def __str__(self) -> str:
        return f"{self.size} pack{'s' * (self.size != 1)} at once ({self.reason})"


def recompute_modes(typed: str, *, compiles: bool) -> list[str]:
    """Return the modes that `typed` allows, fastest first; compiled layers have no selective."""
    if typed != "auto":
        return [typed]
    return [mode for mode in BY_SPEED if not (compiles and mode == "selective")]


def choose_strategy(
    run: PlannedRun,
    strategies: Mapping[str, StrategyConfig],
    modes: Sequence[str],
    *,
    is_stored: bool = False,
    has_deepspeed: bool = True,
) -> Choice:
    """Choose the strategy with the least communication under which a rank fits its GPU.

    `modes`: of recompute that may be taken. `is_stored`: whether the base's files are quantized.
    The strategy of `run` itself does not matter.
    """
    ranks, nodes, method = run.num_ranks, run.num_nodes, run.quantization.method
    if ranks == 1:
        return Choice("single", "1 process")
    if not run.is_on_gpu:
        return Choice("ddp", f"{ranks} processes on a CPU share its memory")
    if is_stored:
        return Choice("ddp", "the base's files are quantized, and such weights cannot be sharded")

    def holds(name: str) -> bool:
        under = replace(run, strategy=strategies[name])
        size = under.size
        tried = (replace(under, recompute=mode) for mode in modes)
        return any(fits(each, estimate_gpu_memory(each, size), size) for each in tried)

    size = _describe_whole(replace(run, strategy=strategies["ddp"], recompute=modes[-1]))
    if holds("ddp"):
        return Choice("ddp", f"each GPU holds all: {size}")
    if method == "int8":
        why = f"weights in int8 cannot be sharded (those of quantization=nf4 can): {size}"
        if has_deepspeed:
            return Choice("zero2", f"only optimizer states can be sharded; {why}")
        return Choice("ddp", why)
    if not holds("fsdp"):
        if method == "none":
            return Choice(
                "fsdp_offload", f"not even all {ranks} GPUs hold it, host memory may: {size}"
            )
        return Choice("fsdp", f"nothing shards more, though memory will be tight: {size}")
    if nodes > 1 and run.hardware.network_gb_per_second < FAST_NETWORK:
        slow = "the links between nodes are slow (no InfiniBand was found)"
        if holds("fsdp_hybrid"):
            return Choice(
                "fsdp_hybrid", f"a node's {ranks // nodes} GPUs hold all, and {slow}: {size}"
            )
        # hpZ shards a second copy of the weights within each node, for the backward pass.
        if has_deepspeed and method == "none" and holds("zero3_hpz"):
            return Choice(
                "zero3_hpz", f"no node holds all, though each holds the weights, and {slow}: {size}"
            )
        return Choice("fsdp", f"it takes all {ranks} GPUs to hold it: {size}")
    if method == "none" and holds("fsdp_grad_op"):
        return Choice(
            "fsdp_grad_op",
            f"a GPU holds the weights, but not their optimizer states as well: {size}",
        )
    where = "a node" if nodes == 1 else f"{nodes} nodes with fast links"
    return Choice("fsdp", f"no GPU holds all, and the {ranks} of {where} do: {size}")


def _describe_whole(run: PlannedRun) -> str:
    """Return what a rank that holds everything would need."""
    peak = estimate_gpu_memory(run)
    states = peak.weights + peak.trainable + peak.optimizer + peak.gradients
    return (
        f"weights, gradients and optimizer states take {states / GIB:.1f} GiB and a whole step "
        f"{peak.total / GIB:.1f}, of a GPU's {run.hardware.memory_gib:.0f} GiB "
        f"{usable_bytes(run.hardware) / GIB:.0f} can be filled"
    )


def choose_recompute(run: PlannedRun, *, compiles: bool = False) -> tuple[Choice, bool]:
    """Choose the fastest mode that fits, and whether one does; else the one of least memory."""
    size = run.size
    modes = recompute_modes("auto", compiles=compiles)
    needs = {mode: _Need.of(replace(run, recompute=mode), size) for mode in modes}
    chosen = next((mode for mode, need in needs.items() if need.fits), None)
    least = needs[chosen or modes[-1]]
    beside = (
        f"beside {least.beside:.1f} of all else on a GPU of {run.hardware.memory_gib:.0f} GiB, "
        f"{run.tokens:,} tokens a micro-batch, by arithmetic"
    )
    if chosen == "none":
        return Choice("none", f"all activations fit: {least.activations:.1f} GiB {beside}"), True
    if chosen is None:
        said = f"none fits; this takes the least memory: {least.activations:.1f} GiB of activations"
        return Choice(modes[-1], f"{said} {beside}"), False
    said = f"{least.activations:.1f} GiB of activations instead of {needs['none'].activations:.1f}"
    return Choice(chosen, f"the fastest that fits: {said} {beside}"), True


def choose_micro_batch(run: PlannedRun) -> tuple[MicroBatchChoice, bool]:
    """Choose how many of a rank's packs run at once, and whether even one fits.

    The largest divisor of the packs of a step that fits; where none is tried before the run, some
    room is left. Recompute stays: more packs at once do not make up for computing layers twice.
    """
    packs, size = run.micro_batch_size * run.accumulation, run.size
    share = 1.0 if can_try(run.strategy) else UNTRIED_SHARE
    needs: dict[int, _Need] = {}
    number = 1
    for number in reversed(divisors(packs)):
        needs[number] = _Need.of(run.with_micro_batch(number), size, share)
        if needs[number].fits:
            break
    chosen = needs[number]
    reason = (
        f"of a step's {packs} a rank: {chosen.activations:.1f} GiB of activations with recompute="
        f"{run.recompute} beside {chosen.beside:.1f} of all else on a GPU of "
        f"{run.hardware.memory_gib:.0f} GiB, by arithmetic"
    )
    if not chosen.fits:
        reason = f"not even one fits; {reason}"
    elif larger := [other for other in needs if other > number]:
        other = larger[-1]
        reason += f"; {other}, the next divisor, would be {needs[other].activations:.1f}"
    return MicroBatchChoice(number, reason), chosen.fits


@dataclass(frozen=True, kw_only=True, slots=True)
class _Need:
    """What a run takes of a GPU, in GiB, and whether it fits."""

    activations: float
    beside: float
    """all other parts at the moment of most activations"""
    fits: bool

    @classmethod
    def of(cls, run: PlannedRun, size: ModelSize, share: float = 1.0) -> _Need:
        """Return it, with activations counted as if only `share` of the room were for them."""
        moments = estimate_moments(run, size)
        most = max(moments, key=lambda each: each.activations)
        counted: list[GpuMemory] = [
            replace(each, activations=each.activations / share) for each in moments
        ]
        peak = max(counted, key=lambda each: each.total)
        return cls(
            activations=most.activations / GIB,
            beside=(most.total - most.activations) / GIB,
            fits=fits(run, peak, size),
        )
