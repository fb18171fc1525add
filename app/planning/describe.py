"""A plan as plain values, for printing, the HTML page and plan.json.

Includes the figures of DeepSpeed's own estimators, for users who know them. They assume that every
weight is trained in half precision with fp32 master weights: 2 bytes per weight and 2 per gradient
in half precision, and 16 in fp32 for gradient, weight and AdamW's two states; no activations.
Before 0.19 those for ZeRO-2 counted gradients as if each GPU kept all of them (4 + 16 / GPUs bytes
per weight, instead of 2 + 18 / GPUs): 15.93 GB instead of 11.28 for 2,851 M weights on 8 GPUs.
"""

from __future__ import annotations

from typing import Any

from app.planning.advice import Candidate
from app.planning.communication import list_collectives
from app.planning.host import estimate_disk, estimate_host_memory
from app.planning.memory import (
    GIB,
    PlannedRun,
    estimate_gpu_memory,
    fits,
    fits_host,
    usable_bytes,
)
from app.planning.speed import describe_batch, describe_range, estimate_flops, estimate_speed
from app.strategy.settings import ZeroConfig

HALF_BYTES, FP32_BYTES = 2, 16
"""bytes per weight in half precision, and of all fp32 states; a half gradient makes it 18"""
_BUFFER_FACTOR = 1.5
"""factor by which DeepSpeed multiplies host memory, for its buffers"""


def describe_run(run: PlannedRun, tokens: int | None, tokens_by: str = "") -> dict[str, Any]:
    """Return memory, communication and speed of a planned run.

    `tokens`: number of tokens that the run trains on. `tokens_by`: how they were estimated, or why
    they are unknown.
    """
    size, hardware = run.size, run.hardware
    memory = estimate_gpu_memory(run, size)
    host = estimate_host_memory(run, size)
    speed = estimate_speed(run, size)
    flops, disk_gib = estimate_flops(run), estimate_disk(run, size) / GIB
    return {
        "model": run.model.name,
        "num_weights": run.model.num_weights,
        "num_trained": run.model.count(trained=True),
        "hardware": str(hardware),
        "fits": fits(run, memory, size),
        "fits_host": fits_host(run, size),
        "settings": _settings(run),
        "gpu_gib": {name: value / GIB for name, value in memory.parts.items()},
        "gpu_total_gib": memory.total / GIB,
        "peak": memory.moment,
        "model_type": run.model.widths.model_type,
        "is_compared": run.model.widths.is_compared,
        "gpu_usable_gib": usable_bytes(hardware) / GIB,
        "gpu_memory_gib": hardware.memory_gib,
        "host_gib": {
            "loading": host.loading / GIB,
            "offloaded": host.offloaded / GIB,
            "memory": hardware.host_memory_gib,
        },
        "deepspeed_states_gib": _estimate_deepspeed_states(run),
        "disk_gib": disk_gib,
        "has_disk_states": run.strategy.offload_optimizer == "disk",
        "nvme_gib": hardware.nvme_gib,
        "fits_disk": not hardware.nvme_gib or disk_gib <= hardware.nvme_gib,
        "messages": _messages(run),
        "gflop_per_token": flops.total / 1e9,
        "step_seconds": speed.step,
        "seconds": {
            "products": speed.products,
            "attention": speed.attention,
            "traffic": speed.traffic,
            "messages": speed.messages,
            "host copies": speed.host,
            "waiting": speed.exposed,
            "other stages": speed.idle,
        },
        "tokens_per_step": run.tokens_per_step,
        "tokens_per_second": speed.tokens_per_second,
        "tokens_per_second_per_gpu": speed.tokens_per_second / run.num_ranks,
        "tokens_per_second_between": list(speed.between),
        "range_by": describe_range(run),
        "mfu": speed.mfu,
        "verdict": speed.verdict,
        "batch": describe_batch(run),
        "tokens_by": tokens_by,
        **_hours_and_cost(run, tokens, speed.tokens_per_second),
    }


def _messages(run: PlannedRun) -> list[dict[str, Any]]:
    return [
        {
            "what": each.what,
            "kind": each.kind,
            "times": each.times,
            "gib_per_gpu": each.sent / GIB,
            "gib_between_nodes": each.sent_between_nodes / GIB,
        }
        for each in list_collectives(run, run.size)
        if each.num_ranks > 1
    ]


def _hours_and_cost(
    run: PlannedRun, tokens: int | None, tokens_per_second: float
) -> dict[str, float | None]:
    """Return how long training on `tokens` takes, and its cost if the GPUs' price is known."""
    hours = None if tokens is None else tokens / tokens_per_second / 3600
    price = run.hardware.price_per_hour
    cost = None if hours is None or price is None else hours * price * run.num_ranks
    return {"tokens": tokens, "hours": hours, "cost": cost}


def _settings(run: PlannedRun) -> dict[str, Any]:
    return {
        "strategy": run.strategy.name,
        "quantization": run.quantization.method,
        "recompute": run.recompute,
        "stream": run.stream,
        "precision": run.precision,
        "micro_batch_size": run.micro_batch_size,
        "sequence_len": run.sequence_len,
        "accumulation": run.accumulation,
    }


def describe_candidate(candidate: Candidate) -> dict[str, Any]:
    """Return one row of the table of alternatives."""
    run, memory = candidate.run, candidate.memory
    return _settings(run) | {
        "type": " ".join(candidate.overrides),
        "fits": candidate.fits,
        "gpu_gib": {name: value / GIB for name, value in memory.parts.items()},
        "gpu_total_gib": memory.total / GIB,
        "tokens_per_second": candidate.speed.tokens_per_second,
        "is_assumed": run.computes_in_fp8,
        "verdict": candidate.speed.verdict,
    }


def estimate_zero2_states(
    num_weights: float, *, gpus_per_node: int, num_nodes: int = 1, offloads: bool = False
) -> tuple[float, float]:
    """Estimate the bytes of ZeRO-2's states on one GPU, and on the host of one node.

    With `offloads`, optimizer states are on the host.
    """
    gpus = gpus_per_node * num_nodes
    if offloads:
        host = num_weights * max(4 * gpus, FP32_BYTES)
        return HALF_BYTES * num_weights, host * _BUFFER_FACTOR
    gpu = HALF_BYTES * num_weights + (HALF_BYTES + FP32_BYTES) * num_weights / gpus
    return gpu, 4 * num_weights * gpus_per_node * _BUFFER_FACTOR


def estimate_zero3_states(
    num_weights: float,
    largest_layer: float,
    *,
    gpus_per_node: int,
    num_nodes: int = 1,
    offloads_optimizer: bool = False,
    offloads_weights: bool = False,
) -> tuple[float, float]:
    """Estimate the bytes of ZeRO-3's states on one GPU, and on the host of one node.

    `largest_layer`: number of weights of the largest layer. Each process builds the full model.
    """
    gathered, gpus = 2 * HALF_BYTES * largest_layer, gpus_per_node * num_nodes
    bytes_per_weight, loading = HALF_BYTES + FP32_BYTES, 4 * num_weights * gpus_per_node
    if not offloads_optimizer:
        return gathered + bytes_per_weight * num_weights / gpus, loading * _BUFFER_FACTOR
    on_host = bytes_per_weight if offloads_weights else FP32_BYTES
    offloaded = num_weights * on_host / num_nodes
    on_gpu = 0.0 if offloads_weights else HALF_BYTES * num_weights / gpus
    return gathered + on_gpu, max(offloaded, loading) * _BUFFER_FACTOR


def _estimate_deepspeed_states(run: PlannedRun) -> dict[str, float] | None:
    """Return the GiB that DeepSpeed's estimator gives; None if it does not cover this run."""
    strategy, gpus = run.strategy, run.hardware.gpus_per_node
    if not isinstance(strategy, ZeroConfig) or strategy.stage == 1 or not run.trains_base:
        return None
    offloads, weights = strategy.offload_optimizer != "none", float(run.model.num_weights)
    if strategy.stage == 2:
        gpu, host = estimate_zero2_states(
            weights, gpus_per_node=gpus, num_nodes=run.num_nodes, offloads=offloads
        )
    else:
        gpu, host = estimate_zero3_states(
            weights,
            run.model.head_weights,
            gpus_per_node=gpus,
            num_nodes=run.num_nodes,
            offloads_optimizer=offloads,
            offloads_weights=strategy.offload_parameters != "none",
        )
    return {"gpu": gpu / GIB, "host": host / GIB}
