"""Count the FLOPs of a step, and cut the layers of a pipeline into stages of nearly equal FLOPs.

Model FLOPs as in arXiv 2204.02311 (PaLM, appendix B), with half of the FLOPs of full attention for
causal attention. Ranks of a stage are neighbours, so that a node has all ranks of a stage, or only
those of one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from app.model.recompute import WHOLE_LAYERS
from app.strategy.settings import PipelineConfig, cut_layers, num_stages

if TYPE_CHECKING:
    from app.planning.memory import PlannedRun

_ATTENTION_BACKWARD = 2.5
"""FLOPs of attention's backward pass, which computes the scores again, relative to the forward pass
(arXiv 2307.08691, section 4)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flops:
    """FLOPs per token, by operation."""

    products: float
    attention: float
    recomputed_products: float
    """those of recompute, and of forward passes of the base or a teacher for an objective"""
    recomputed_attention: float
    frozen: float
    """products with frozen matrices of layers, recomputed ones included; also part of the above"""
    forward: float
    """those of the forward pass, and of the base's own or a teacher's; also part of the above"""
    recomputed_scores: float
    """scores that the kernels of attention's backward pass compute again"""

    @property
    def model(self) -> float:
        """FLOPs without recompute, as MFU counts them."""
        return self.products + self.attention

    @property
    def total(self) -> float:
        """All FLOPs, including recompute, but not what attention's kernels compute again."""
        return self.model + self.recomputed_products + self.recomputed_attention


def estimate_flops(run: PlannedRun) -> Flops:
    """Estimate the FLOPs per token if each sequence is one document, which is the upper bound."""
    model, widths = run.model, run.model.widths
    frozen, trained = model.multiplied(trained=False), model.multiplied(trained=True)
    if model.is_pair:  # a token passes through either the encoder or the decoder
        frozen, trained = frozen / 2, trained / 2
    layers = model.num_layers / (2 if model.is_pair else 1)
    attention = 2.0 * layers * (1 - model.recurrent_share) * widths.query * run.sequence_len
    head = 2.0 * model.head_weights
    forward = 2.0 * (frozen + trained)
    # The backward pass ends at the lowest trainable layer.
    share = run.trained_share
    reached = share * model.reached
    products = forward + head + reached * forward
    products += share * (2.0 * trained + (1 + model.trains_head) * head)
    every = reached * run.recomputed_share  # layers without a backward pass are not recomputed
    again = again_attention = 0.0
    if run.recompute in WHOLE_LAYERS:
        again, again_attention = forward * every, attention * every
    elif run.recompute == "selective":
        wide = 2.0 * widths.hidden * widths.feed_forward * layers
        again = 2.0 * wide * every
    of_base = 2.0 * frozen if run.runs_base else 0.0
    # Of ranks that share rows, each computes the recurrences of whole ones.
    passes = 1 + reached * (1 + run.share_computed_twice)
    again += 2.0 * (run.context_size - 1) * passes * model.recurrent_weights
    others, others_attention = of_base + head * run.runs_base, attention * run.runs_base
    others += share * head * run.recomputes_head
    if (teacher := run.teacher) is not None:
        sides = 2 if teacher.is_pair else 1
        others += 2.0 * (teacher.multiplied(trained=False) / sides + teacher.head_weights)
        others_attention += (
            2.0 * teacher.num_layers / sides * teacher.widths.query * run.sequence_len
        )
    return Flops(
        forward=forward + head + attention + others + others_attention,
        products=products,
        attention=attention * (1 + 2 * reached),
        recomputed_products=again + others,
        recomputed_attention=again_attention + others_attention,
        frozen=of_base + (forward * (1 + reached) + again) * frozen / max(1.0, frozen + trained),
        recomputed_scores=attention * reached * (_ATTENTION_BACKWARD - 2),
    )


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
