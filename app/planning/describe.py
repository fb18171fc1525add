"""A plan as plain values, for printing, the HTML page and plan.json."""

from __future__ import annotations

from typing import Any

from app.planning.advice import Candidate
from app.planning.communication import list_collectives
from app.planning.flops import estimate_flops
from app.planning.host import estimate_disk, estimate_host_memory
from app.planning.memory import (
    GIB,
    PlannedRun,
    estimate_gpu_memory,
    fits,
    fits_host,
    usable_bytes,
)
from app.planning.speed import describe_batch, describe_range, estimate_speed


def describe_run(run: PlannedRun, tokens: int | None, tokens_by: str = "") -> dict[str, Any]:
    """Return memory, communication and speed of a planned run.

    `tokens`: number of tokens that the run trains on. `tokens_by`: how they were estimated, or why
    they are unknown.
    """
    hardware, memory = run.hardware, estimate_gpu_memory(run)
    host, speed = estimate_host_memory(run), estimate_speed(run)
    flops, disk_gib = estimate_flops(run), estimate_disk(run) / GIB
    return {
        "model": run.model.name,
        "num_weights": run.model.num_weights,
        "num_trained": run.model.count(trained=True),
        "hardware": str(hardware),
        "fits": fits(run, memory),
        "fits_host": fits_host(run),
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
        for each in list_collectives(run)
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
