"""The collectives of an optimizer step: what they send within and between nodes, and for how long.

Volumes as in arXiv 1910.02054 (ZeRO), 2306.10209 (ZeRO++) and 1909.08053 (tensor parallelism).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from app.model.attention import gather_reason, key_repeats
from app.planning.flops import stages_of
from app.planning.memory import PlannedRun
from app.planning.states import ZERO_BUCKET, WeightBytes
from app.strategy import settings

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all-reduce", "all-gather", "reduce-scatter"
ALL_TO_ALL, SEND = "all-to-all", "send"
_QUANTIZED_WEIGHT, _QUANTIZED_GRADIENT = 1.0, 0.5
"""bytes per element that ZeRO++'s qwZ and qgZ send"""
_AVERAGED_WEIGHT = 4.0
"""bytes per weight that local SGD sends to average it, for every dtype"""
_INDEX_BYTES = 4
"""bytes of the index that top-k sends with a gradient"""
_DDP_BUCKET = 25 * 2**20
"""bytes of gradients that DistributedDataParallel reduces at once (its bucket_cap_mb)"""
LINKS = 0.8
"""share of a link's datasheet rate that collectives reach (assumed)"""
_CALL, _HOP, _NETWORK_HOP = 8.4e-6, 3.4e-6, 14e-6
"""seconds of a message that do not depend on its bytes: of a call, and of each step to another GPU
of the node and to another node (NCCL's own model, src/graph/tuning.cc: ring, NVLink, Simple)"""
CONTENTION, MOST_CONTENTION = 0.189, 0.40
"""slowdown of kernels while NCCL sends on the same GPU, mean and maximum (arXiv 2507.03114)"""


@dataclass(frozen=True, slots=True)
class Collective:
    """One kind of collective of a step."""

    what: str
    kind: str
    num_bytes: float
    """bytes of the full tensor"""
    times: float
    """number of calls per optimizer step"""
    num_ranks: int
    """number of ranks in its group"""
    num_nodes: int = 1
    """number of nodes that these ranks are on"""
    overlaps: bool = True
    """whether it overlaps with computation"""
    messages: int = 1
    """messages of a call: one per layer, e.g., or per bucket"""
    in_forward: float = 0.0
    """share of the calls that belongs to forward passes"""
    exposed_share: float = 0.0
    """share of a call that overlaps with nothing: first units of a forward pass, last gradients"""

    @property
    def _passes(self) -> int:
        return 2 if self.kind == ALL_REDUCE else 1

    @property
    def latency(self) -> float:
        """Seconds per step that do not depend on the bytes: a ring, or a tree for all-reduce."""
        nodes = self.num_nodes
        inside, between = (self.num_ranks - nodes), float(nodes - 1)
        if self.kind == ALL_REDUCE:
            inside, between = 2 * (self.num_ranks // nodes - 1), 2 * math.log2(nodes)
        return self.times * self.messages * (_CALL + inside * _HOP + between * _NETWORK_HOP)

    @property
    def sent(self) -> float:
        """Bytes that a rank sends per step, by the ring algorithm."""
        ranks = self.num_ranks
        if self.kind == SEND:
            return self.num_bytes * self.times
        return self._passes * self.num_bytes * self.times * (ranks - 1) / ranks

    @property
    def sent_between_nodes(self) -> float:
        """Bytes that a node sends to other nodes per step, for one group of ranks."""
        nodes = self.num_nodes
        if self.kind == SEND:
            return self.sent if nodes > 1 else 0.0
        return self._passes * self.num_bytes * self.times * (nodes - 1) / nodes


def sent_by_node(run: PlannedRun, each: Collective) -> float:
    """Return the bytes that a node sends to other nodes per step, for all groups of its ranks."""
    groups = 1
    if each.num_ranks < run.num_ranks or each.kind == SEND:
        # Groups with one rank per node, e.g., are as many as a node's GPUs and share its network.
        groups = max(1, run.hardware.gpus_per_node * each.num_nodes // each.num_ranks)
    return each.sent_between_nodes * groups


def collective_seconds(run: PlannedRun, each: Collective) -> float:
    """Estimate the time of a collective: latency, and its slower part, within or between nodes."""
    hardware = run.hardware
    inside = between = 0.0
    if each.num_ranks > each.num_nodes:
        inside = each.sent / (LINKS * hardware.link_gb_per_second * 1e9)
    if each.num_nodes > 1:
        between = sent_by_node(run, each) / (LINKS * hardware.network_gb_per_second * 1e9)
    return each.latency + max(inside, between)


def exposed_seconds(
    run: PlannedRun,
    collectives: list[Collective],
    forward: float,
    backward: float,
    contention: float = CONTENTION,
) -> float:
    """Estimate the seconds that collectives add to the passes of an optimizer step.

    `forward`, `backward`: seconds of one pass of a micro-batch. A pass hides at most its own
    messages, of which those that are sent once per step belong to the last backward pass. While
    they are sent, kernels are slower by `contention`.
    """
    steps, added = run.accumulation, 0.0
    ahead = behind = at_end = 0.0
    for each in collectives:
        seconds = collective_seconds(run, each)
        if not each.overlaps:
            added += seconds
            continue
        # What begins each forward pass, or ends the step's last backward pass.
        added += each.exposed_share * seconds * (each.in_forward or 1 / max(1, each.times))
        if each.times < steps:
            at_end += seconds
        else:
            ahead += seconds * each.in_forward / steps
            behind += seconds * (1 - each.in_forward) / steps

    def longer(computes: float, sends: float) -> float:
        return max(contention * min(computes, sends), sends - computes)

    added += steps * longer(forward, ahead) + (steps - 1) * longer(backward, behind)
    return added + longer(backward, behind + at_end)


def list_collectives(run: PlannedRun) -> list[Collective]:
    """List the collectives of a run in one optimizer step; of a pipeline's rank that sends most."""
    if stages := stages_of(run):
        return max(
            map(list_collectives, stages), key=lambda found: sum(each.sent for each in found)
        )
    if run.num_ranks == 1:
        return _between_stages(run)
    exchanges = [*_of_context_parallel(run), *_of_expert_parallel(run), *_between_stages(run)]
    if isinstance(run.strategy, settings.ZeroConfig):
        return _of_zero(run, run.strategy) + exchanges
    if isinstance(run.strategy, settings.FsdpConfig):
        split = [*_of_tensor_parallel(run), *exchanges]
        return [*_of_fsdp(run, run.strategy), *split]
    return _of_ddp(run) + exchanges


def _of_ddp(run: PlannedRun) -> list[Collective]:
    whole, strategy = run.size.whole, run.strategy
    sent = whole.trained
    buckets = max(1, math.ceil(sent / _DDP_BUCKET))
    if isinstance(strategy, settings.DdpConfig) and strategy.compression in ("bf16", "fp16"):
        sent = whole.num_trained * 2
    elif isinstance(strategy, settings.DdpConfig) and strategy.compression == "topk":
        own = strategy.topk_share * (whole.trained + _INDEX_BYTES * whole.num_trained)
        sent = own * run.num_ranks
        return [_over_all(run, "largest gradients", ALL_GATHER, sent, 1, messages=buckets)]
    elif isinstance(strategy, settings.DdpConfig) and strategy.compression == "powersgd":
        layers = run.model.layers
        sent = sum(
            4.0 * strategy.powersgd_rank * sum(weight.shape) * count
            for weights, count in layers
            for weight in weights.values()
            if weight.requires_grad
        )
    return [_over_all(run, "gradients", ALL_REDUCE, sent, 1, messages=buckets)]


def _over_all(
    run: PlannedRun, what: str, kind: str, num_bytes: float, times: float, **how: Any
) -> Collective:
    """Return a collective of all ranks; `how`: `messages`, and what differs from the defaults."""
    share = 1 / how["messages"]
    ranks, nodes = run.num_ranks, run.num_nodes
    return Collective(what, kind, num_bytes, times, ranks, nodes, exposed_share=share, **how)


def _of_zero(run: PlannedRun, strategy: settings.ZeroConfig) -> list[Collective]:
    whole, steps, units = run.size.whole, run.accumulation, run.model.num_layers + 2
    buckets = max(1, math.ceil(whole.num_trained / ZERO_BUCKET))
    if strategy.stage < 3:
        # Stage 2 keeps only a shard of the gradients, so it reduces them in each micro-batch.
        times = steps if strategy.stage == 2 else 1
        sent, common = whole.trained, {"messages": buckets}
        return [
            _over_all(run, "gradients", REDUCE_SCATTER, sent, times, **common),
            _over_all(run, "updated weights", ALL_GATHER, sent, 1, overlaps=False, **common),
        ]
    weights, gradients = whole.total, whole.trained
    num_weights = run.model.num_weights
    forward = num_weights * _QUANTIZED_WEIGHT if strategy.quantized_weights else weights
    if strategy.quantized_gradients:
        gradients = whole.num_trained * _QUANTIZED_GRADIENT
    back, node = "weights, backward", run.hardware.gpus_per_node
    backward = _over_all(run, back, ALL_GATHER, forward, steps, messages=units)
    if strategy.partition_within_node:
        backward = Collective(back, ALL_GATHER, forward, steps, node, messages=units)
    times, ahead = steps * run.num_forwards, {"messages": units, "in_forward": 1.0}
    return [
        _over_all(run, "weights, forward", ALL_GATHER, forward, times, **ahead),
        backward,
        _over_all(run, "gradients", REDUCE_SCATTER, gradients, steps, messages=buckets),
    ]


def _of_fsdp(run: PlannedRun, strategy: settings.FsdpConfig) -> list[Collective]:
    """List the collectives of FSDP2 among ranks that shard weights, and between replicas."""
    whole, groups = run.size.whole, run.num_ranks // run.tensor_size
    if not strategy.shards_data_parallel:
        return []
    replicas = min(groups, strategy.replicas or run.num_nodes)
    shards = groups // replicas
    # The ranks of a shard group are consecutive, so it may span several nodes.
    per_node = max(1, run.hardware.gpus_per_node // run.tensor_size)
    nodes = max(1, shards // per_node)
    units = run.model.num_layers + 2
    reduced = 1 if run.keeps_gradients_whole else run.accumulation
    found: list[Collective] = []
    if shards > 1:
        found += _of_shards(run, strategy, reduced, (shards, nodes))
    between = replicas, min(replicas, run.num_nodes)
    if replicas > 1 and isinstance(strategy, settings.LocalSgdConfig):
        every, sent = strategy.sync_every_steps, _AVERAGED_WEIGHT * whole.num_trained / shards
        what = f"weights between nodes, every {every} steps"
        found.append(Collective(what, ALL_REDUCE, sent, 1 / every, *between, overlaps=False))
    elif replicas > 1:
        what, sent = "gradients between replicas", run.sent_share * whole.trained / shards
        how: dict[str, Any] = {"messages": units, "exposed_share": 1 / units}
        found.append(Collective(what, ALL_REDUCE, sent, reduced, *between, **how))
    return found


def _of_shards(
    run: PlannedRun, strategy: settings.FsdpConfig, reduced: int, group: tuple[int, int]
) -> list[Collective]:
    """List the gathers and reductions of FSDP2 among a group of ranks on a number of nodes."""
    size, (ranks, nodes) = run.size, group
    whole, ends = size.whole, size.layer + size.embedding
    forwards = run.num_forwards
    # Kept from the first micro-batch of a step to the last, unless told otherwise.
    keeps = not strategy.reshard_after_forward
    gathers = 1 if keeps else forwards + 1
    common = whole.gathered - whole.experts
    times = 1 if keeps else run.accumulation * gathers
    weights = Collective(
        *("weights", ALL_GATHER, common, times, ranks, nodes),
        messages=run.model.num_layers + 2,
        in_forward=min(forwards, gathers) / gathers,
        exposed_share=(ends.gathered - ends.experts) / common,
    )
    trained = run.sent_share * (whole.trained - whole.experts_trained)
    gradients = replace(
        weights,
        what="gradients",
        kind=REDUCE_SCATTER,
        num_bytes=trained,
        times=reduced,
        in_forward=0.0,
        exposed_share=run.sent_share * (ends.trained - ends.experts_trained) / max(1.0, trained),
    )
    found = [weights, gradients, *_of_split_experts(run, whole, weights, gradients)]
    if run.teacher is not None:
        units = run.teacher.num_layers + 2
        of_teacher = replace(
            weights,
            what="weights of the teacher",
            num_bytes=run.teacher_size.whole.frozen,
            times=run.accumulation,
            messages=units,
            in_forward=1.0,
            exposed_share=1 / units,
        )
        found.append(of_teacher)
    return found


def _of_split_experts(
    run: PlannedRun, whole: WeightBytes, weights: Collective, gradients: Collective
) -> list[Collective]:
    """List what FSDP2 sends of experts, if other ranks hold different ones.

    Experts that one rank has alone are copied like gathered ones, and nothing is sent.
    """
    if not whole.experts:
        return []
    ranks = weights.num_ranks // run.expert_size
    of_experts = replace(
        weights,
        what="weights of experts",
        num_bytes=whole.experts,
        num_ranks=ranks,
        num_nodes=min(weights.num_nodes, ranks),
        messages=run.model.expert_layers,
        exposed_share=1 / run.model.expert_layers,
    )
    reduced = replace(
        of_experts,
        what="gradients of experts",
        kind=REDUCE_SCATTER,
        num_bytes=whole.experts_trained * run.sent_share,
        times=gradients.times,
        in_forward=0.0,
    )
    return [of_experts, reduced]


def _between_stages(run: PlannedRun) -> list[Collective]:
    """List what a stage of a pipeline sends: hidden states on, and their gradients back."""
    if run.stage is None:
        return []
    what, times = "hidden states between stages", run.stage.sent * run.accumulation
    nodes = 2 if run.stage.crosses_nodes else 1
    return [Collective(what, SEND, run.hidden_bytes, times, 2, nodes, overlaps=False)]


def _of_tensor_parallel(run: PlannedRun) -> list[Collective]:
    """List two all-reduces per layer and pass; recomputing a layer repeats its forward ones."""
    if run.tensor_size == 1:
        return []
    num_bytes = float(run.tokens * run.model.widths.hidden * run.execution.value_bytes)
    times = 2 * (2 + run.share_computed_twice) * run.model.num_layers * run.accumulation
    what, ranks = "hidden states of split layers", run.tensor_size
    return [Collective(what, ALL_REDUCE, num_bytes, times, ranks, overlaps=False)]


def _of_context_parallel(run: PlannedRun) -> list[Collective]:
    """List what attention to split rows sends; recomputing a layer repeats it."""
    ranks, widths = run.context_size, run.model.widths
    if ranks == 1:
        return []
    if gather_reason(widths.heads, widths.key_heads, ranks):
        what, kind = "keys and values of split rows", ALL_GATHER
        features = 2 * ranks * widths.key_value
    else:
        what, kind = "heads of split rows", ALL_TO_ALL
        repeats = key_repeats(widths.heads, widths.key_heads, ranks)
        features = 2 * (widths.query + repeats * widths.key_value)
    directions, recurrent = 2 + run.recomputed_share, run.model.recurrent_share
    passes = directions * run.model.num_layers * run.accumulation
    of_feature = run.tokens * run.execution.value_bytes
    nodes = max(1, ranks // run.hardware.gpus_per_node)
    sent, times = float(of_feature * features), passes * (1 - recurrent)
    exchange = Collective(what, kind, sent, times, ranks, nodes, overlaps=False)
    if not recurrent:
        return [exchange]
    gather = replace(
        exchange,
        what="whole rows for recurrent layers",
        kind=ALL_GATHER,
        num_bytes=float(of_feature * ranks * widths.hidden),
        times=passes * recurrent,
    )
    return [exchange, gather]


def _of_expert_parallel(run: PlannedRun) -> list[Collective]:
    """List the hidden states that travel to experts and back; recomputing a layer repeats it."""
    if (ranks := run.expert_size) == 1:
        return []
    directions, widths = 2 + run.recomputed_share, run.model.widths
    features = widths.hidden * widths.routed_copies // 2
    num_bytes = float(run.tokens * features * run.execution.value_bytes)
    times = 2 * directions * run.model.expert_layers * run.accumulation
    nodes = max(1, ranks // run.hardware.gpus_per_node)
    what = "hidden states to experts and back"
    return [Collective(what, ALL_TO_ALL, num_bytes, times, ranks, nodes, overlaps=False)]
