"""A pipeline as runs of its stages: each rank's layers, as a run on the ranks that share them.

Ranks of a stage are neighbours, so that a node has all ranks of a stage, or only those of one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from app.planning.flops import estimate_flops
from app.strategy.settings import PipelineConfig, cut_layers, num_stages

if TYPE_CHECKING:
    from app.planning.memory import PlannedRun


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """What a run needs because other ranks compute the layers before and behind its own."""

    in_flight: float
    """micro-batches whose activations are saved at a time; of several stages per rank their mean"""
    received: int
    """boundaries over which a rank receives hidden states or their gradients"""
    sent: int
    """boundaries over which it sends them"""
    crosses_nodes: bool
    """whether the slowest of these boundaries is between two nodes"""


def stages_of(run: PlannedRun) -> list[PlannedRun]:
    """Return what each rank of a pipeline computes; nothing for a run that is no pipeline."""
    strategy = run.strategy
    if not isinstance(strategy, PipelineConfig) or run.stage is not None:
        return []
    size, card = strategy.pipeline_parallel_size, run.hardware
    ranks = max(1, run.num_ranks // size)
    nodes = max(1, ranks // card.gpus_per_node)
    hardware = replace(card, gpus_per_node=ranks // nodes, num_nodes=nodes)
    bounds = bounds_of_stages(run)
    lowest = run.model.num_layers - run.model.trained_layers
    # Gradients come back over the boundary behind a stage if it, or one before it, trains.
    trains = [run.model.trains_embedding or stop > lowest for _, stop in bounds]
    found = []
    for rank in range(size):
        own = range(rank, len(bounds), size)
        before, behind = [n - 1 for n in own if n], [n for n in own if n < len(bounds) - 1]
        stage = Stage(
            in_flight=micro_batches_in_flight(strategy, rank, run.accumulation),
            received=len(before) + sum(trains[boundary] for boundary in behind),
            sent=len(behind) + sum(trains[boundary] for boundary in before),
            crosses_nodes=run.num_nodes > 1,
        )
        model = run.model.part([bounds[number] for number in own])
        found.append(replace(run, model=model, hardware=hardware, stage=stage))
    return found


def bounds_of_stages(run: PlannedRun) -> list[tuple[int, int]]:
    """Return the layers [first, stop) of each stage of a pipeline, of nearly equal FLOPs.

    Not of seconds, so that they do not depend on a rank's GPU.
    """
    model = run.model
    lowest, last = model.num_layers - model.trained_layers, model.num_layers - 1
    kinds = [kind for kind, (_, count) in enumerate(model.layers) for _ in range(count)]
    known: dict[tuple[int, bool, bool], float] = {}
    costs = []
    for number, kind in enumerate(kinds):
        key = kind, number >= lowest, number == last
        if key not in known:
            layer = replace(run, model=model.part([(number, number + 1)]))
            known[key] = estimate_flops(layer).total
        costs.append(known[key])
    return cut_layers(costs, num_stages(run.strategy))


def micro_batches_in_flight(strategy: PipelineConfig, rank: int, num_batches: int) -> float:
    """Return how many micro-batches have passed a rank's stages forward, and not yet backward.

    1F1B (arXiv 2006.09503) starts as many as there are stages behind a rank; interleaved stages
    (arXiv 2104.04473) as many again for each further stage of a rank, and two for each rank behind.
    """
    size, stages = strategy.pipeline_parallel_size, strategy.stages_of_rank
    behind = size - 1 - rank
    if stages == 1:
        return min(behind + 1, num_batches)
    of_round = num_batches // max(1, num_batches // size)
    return min((stages - 1) * of_round + 2 * behind + 1, stages * num_batches) / stages
