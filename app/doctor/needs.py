"""What a training's step sends, beside what the links carry, and the field's rules of thumb."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from app.config import PlanConfig, settings_of
from app.doctor.bandwidth import Measured, format_speed
from app.doctor.rows import OK, WARNING, Row
from app.planning.communication import ALL_REDUCE, Collective, list_collectives
from app.planning.hardware import HardwareConfig, known_card, with_local_host
from app.planning.memory import PlannedRun
from app.planning.planned import load_strategies, plan_run, read_config_json
from app.planning.speed import estimate_speed
from app.process.gpus import Machine

GOOD_SHARE = (0.80, 0.85)
"""of a link's nominal bandwidth, that large messages reach over a good one (the rule of
stas00/ml-engineering, network/README.md)"""
RULE_BITS = 48
"""three messages of two bytes a weight, in bits: ZeRO-3's and FSDP's all-gather forward and
backward, and reduce-scatter"""
WAITS = 1.0
"""messages that take longer than computing make a step wait, however they overlap"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """A kind of message that an optimizer step sends."""

    what: str
    kind: str
    times: float
    """in an optimizer step"""
    gb: float
    """that a rank sends in a step"""
    models: float
    """the same in units of the weights, as the rules of the field count them"""
    seconds: float | None
    """at the bandwidth that was measured"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What a step of a training sends, and how long that takes here."""

    strategy: str
    needs: tuple[Need, ...]
    rule_gbit: float
    """48 x M / N: of a node and micro-step under full sharding"""
    rule_seconds: float | None
    compute_seconds: float | None
    """of a step, by arithmetic; None where the GPU is not known"""

    @property
    def seconds(self) -> float:
        """All messages of a step, one after the other."""
        return sum(need.seconds or 0.0 for need in self.needs)


def hardware_of_ranks(
    typed: HardwareConfig, machine: Machine, ranks_per_node: int, num_nodes: int
) -> HardwareConfig:
    """Return the numbers of the GPUs here, or those that are typed, for the ranks that run."""
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


def nominal_gb_per_second(hardware: HardwareConfig) -> float:
    """Return the nominal GB/s of the slowest link of a rank, one direction; 0 where not known."""
    if hardware.num_nodes == 1:
        return hardware.link_gb_per_second
    # A node's adapters serve all its ranks, and a ring enters and leaves a node once.
    return min(hardware.network_gb_per_second, hardware.link_gb_per_second or float("inf"))


def estimate_needs(
    config: PlanConfig, hardware: HardwareConfig, measured: Sequence[Measured]
) -> Needs:
    """Return what a step of `config` sends between the ranks of `hardware`."""
    run = _plan(config, hardware)
    collectives = list_collectives(run)
    size = run.size
    weights = size.whole.frozen + size.whole.trained
    needs = tuple(_need(one, weights, measured) for one in collectives)
    # Ranks stand for nodes where there is one node.
    nodes = hardware.num_nodes if hardware.num_nodes > 1 else run.num_ranks
    gbit = RULE_BITS * run.model.num_weights / nodes / 1e9
    best = best_of(measured, ALL_REDUCE)
    computes = None
    if hardware.half_tflops:
        speed = estimate_speed(run, size)
        computes = speed.products + speed.attention + speed.traffic
    return Needs(
        strategy=run.strategy.name,
        needs=needs,
        rule_gbit=gbit,
        rule_seconds=gbit / 8 / best if best else None,
        compute_seconds=computes,
    )


def _plan(config: PlanConfig, hardware: HardwareConfig) -> PlannedRun:
    strategies = load_strategies(settings_of)
    if not hardware.memory_gib:  # a CPU: what a training takes there for `auto`
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


def _need(one: Collective, weights: float, measured: Sequence[Measured]) -> Need:
    best = best_of(measured, one.kind)
    ring = (one.num_ranks - 1) / one.num_ranks
    return Need(
        what=one.what,
        kind=one.kind,
        times=one.times,
        gb=one.sent / 1e9,
        models=one.sent / ring / weights,
        seconds=one.sent / 1e9 / best if best else None,
    )


def best_of(measured: Sequence[Measured], kind: str) -> float:
    """Return the highest bus bandwidth of a kind of message, in GB/s; 0 where none was measured."""
    return max((one.gb_per_second for one in measured if one.kind == kind), default=0.0)


def judge_link(measured: Sequence[Measured], hardware: HardwareConfig) -> list[Row]:
    """Judge the best all-reduce by the link's nominal bandwidth."""
    best, nominal = best_of(measured, ALL_REDUCE), nominal_gb_per_second(hardware)
    if not best or not nominal:
        return []
    share, (low, high) = best / nominal, GOOD_SHARE
    found = (
        f"all-reduce reaches {format_speed(best)} GB/s, {share:.0%} of the link's "
        f"nominal {format_speed(nominal)}; a good one reaches {low:.0%} to "
        f"{high:.0%}"
    )
    if share >= low:
        return [Row("link", OK, found)]
    fix = "NCCL_DEBUG=INFO shows the way that NCCL takes; nvidia-smi topo -m the links"
    return [Row("link", WARNING, found, fix)]


def judge_needs(needs: Needs) -> list[Row]:
    """Judge whether a step would wait for its messages."""
    if needs.compute_seconds is None or not needs.needs:
        return []
    share = needs.seconds / needs.compute_seconds
    found = (
        f"a step under {needs.strategy} sends for {needs.seconds:.3g} s, and computes for "
        f"{needs.compute_seconds:.3g} s by arithmetic"
    )
    if share <= WAITS:
        return [Row("step", OK, found)]
    fix = "trainer.gradient_accumulation_steps=N, or a strategy that sends less: docs/choosing.md"
    return [Row("step", WARNING, found, fix)]
