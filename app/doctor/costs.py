"""Compare the communication of a training step with the measured bandwidth and rules of thumb."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from app.config import PlanConfig, settings_of
from app.doctor.bandwidth import Measurement, format_speed
from app.doctor.rows import OK, WARNING, Row
from app.planning.communication import ALL_REDUCE, Collective, list_collectives
from app.planning.hardware import HardwareConfig, known_card, with_local_host
from app.planning.memory import PlannedRun
from app.planning.planned import load_strategies, plan_run, read_config_json
from app.planning.speed import estimate_speed
from app.process.gpus import Machine
from common.text import percent

GOOD_SHARE = (0.80, 0.85)
"""share of a link's nominal bandwidth that large messages should reach (the rule of thumb of
stas00/ml-engineering, network/README.md)"""
RULE_BITS = 48
"""bits per weight of three collectives with two bytes per weight: the all-gathers of the forward
and backward pass and the reduce-scatter of ZeRO-3 and FSDP"""
MAX_RATIO = 1.0
"""largest ratio of communication to computation that can overlap completely"""


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveCost:
    """What one kind of collective sends in an optimizer step, and how long it takes."""

    what: str
    kind: str
    times: float
    """number of calls per optimizer step"""
    gb: float
    """GB that a rank sends per step"""
    models: float
    """the same in units of the model's weights, as rules of thumb count it"""
    seconds: float | None
    """time at the measured bandwidth"""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommunicationCost:
    """What an optimizer step sends between ranks, and its communication and compute times."""

    strategy: str
    collectives: tuple[CollectiveCost, ...]
    rule_gbit: float
    """Gbit per node and micro-batch by the rule of thumb for full sharding, 48 x M / N"""
    rule_seconds: float | None
    compute_seconds: float | None
    """estimated compute time of a step; None if the GPU is unknown"""

    @property
    def seconds(self) -> float:
        """Time of all collectives of a step without overlap."""
        return sum(each.seconds or 0.0 for each in self.collectives)


def hardware_of_ranks(
    typed: HardwareConfig, machine: Machine, ranks_per_node: int, num_nodes: int
) -> HardwareConfig:
    """Return the hardware of the launched ranks: of this machine's GPUs, or as overridden."""
    known = typed
    if typed.name == "auto" and not typed.memory_gib and machine.gpus:
        smallest = min(machine.gpus, key=lambda gpu: gpu.memory_gib)
        card = known_card(smallest.name, smallest.memory_gib)
        if card is not None:
            known = with_local_host(settings_of("hardware", card))
    is_known = known.memory_gib > 0
    return replace(
        known,
        gpus_per_node=ranks_per_node,
        num_nodes=num_nodes,
        has_bf16=known.has_bf16 if is_known else False,
    )


def nominal_bandwidth(hardware: HardwareConfig) -> float:
    """Return the nominal GB/s of a rank's slowest link in one direction; 0 if unknown."""
    if hardware.num_nodes == 1:
        return hardware.link_gb_per_second
    # A node's adapters serve all its ranks; a ring enters and leaves each node once.
    return min(hardware.network_gb_per_second, hardware.link_gb_per_second or float("inf"))


def estimate_communication(
    config: PlanConfig, hardware: HardwareConfig, measured: Sequence[Measurement]
) -> CommunicationCost:
    """Estimate the communication of a step of `config` on the ranks of `hardware`."""
    run = _plan(config, hardware)
    collectives = list_collectives(run)
    size = run.size
    weights = size.whole.frozen + size.whole.trained
    costs = tuple(_cost_of(collective, weights, measured) for collective in collectives)
    # On a single node, each rank counts as a node.
    nodes = hardware.num_nodes if hardware.num_nodes > 1 else run.num_ranks
    gbit = RULE_BITS * run.model.num_weights / nodes / 1e9
    best = best_bandwidth(measured, ALL_REDUCE)
    computes = None
    if hardware.half_tflops:
        speed = estimate_speed(run, size)
        computes = speed.products + speed.attention + speed.traffic
    return CommunicationCost(
        strategy=run.strategy.name,
        collectives=costs,
        rule_gbit=gbit,
        rule_seconds=gbit / 8 / best if best else None,
        compute_seconds=computes,
    )


def _plan(config: PlanConfig, hardware: HardwareConfig) -> PlannedRun:
    strategies = load_strategies(settings_of)
    if not hardware.memory_gib:  # a CPU: `auto` as in a training run on CPUs
        trainer, recompute = config.trainer, config.recompute
        config = replace(
            config,
            strategy=strategies["ddp"] if config.strategy.name == "auto" else config.strategy,
            recompute=replace(
                recompute, mode="none" if recompute.mode == "auto" else recompute.mode
            ),
            trainer=replace(trainer, micro_batch_size=trainer.least_micro_batch),
        )
    run, _ = plan_run(config, hardware, read_config_json(config.model), strategies=strategies)
    return run


def _cost_of(
    collective: Collective, weights: float, measured: Sequence[Measurement]
) -> CollectiveCost:
    best = best_bandwidth(measured, collective.kind)
    ring = (collective.num_ranks - 1) / collective.num_ranks
    return CollectiveCost(
        what=collective.what,
        kind=collective.kind,
        times=collective.times,
        gb=collective.sent / 1e9,
        models=collective.sent / ring / weights,
        seconds=collective.sent / 1e9 / best if best else None,
    )


def best_bandwidth(measured: Sequence[Measurement], kind: str) -> float:
    """Return the highest bus bandwidth of a collective in GB/s; 0 if it was not measured."""
    return max((each.gb_per_second for each in measured if each.kind == kind), default=0.0)


def list_link_rows(measured: Sequence[Measurement], hardware: HardwareConfig) -> list[Row]:
    """Compare the best all-reduce with the link's nominal bandwidth."""
    best, nominal = best_bandwidth(measured, ALL_REDUCE), nominal_bandwidth(hardware)
    if not best or not nominal:
        return []
    share, (low, high) = best / nominal, GOOD_SHARE
    found = (
        f"all-reduce reaches {format_speed(best)} GB/s, {percent(share, 0)} of the link's "
        f"nominal {format_speed(nominal)}; {percent(low, 0)} to {percent(high, 0)} is good"
    )
    if share >= low:
        return [Row("link", OK, found)]
    fix = "NCCL_DEBUG=INFO shows the path that NCCL uses; nvidia-smi topo -m shows the links"
    return [Row("link", WARNING, found, fix)]


def list_step_rows(cost: CommunicationCost) -> list[Row]:
    """Say whether a step would wait for its communication."""
    if cost.compute_seconds is None or not cost.collectives:
        return []
    ratio = cost.seconds / cost.compute_seconds
    found = (
        f"a step under {cost.strategy} takes {cost.seconds:.3g} s of communication, and an "
        f"estimated {cost.compute_seconds:.3g} s of computation"
    )
    if ratio <= MAX_RATIO:
        return [Row("step", OK, found)]
    fix = "trainer.gradient_accumulation_steps=N, or a strategy that sends less: --help strategy"
    return [Row("step", WARNING, found, fix)]
