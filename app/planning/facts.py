"""A plan as plain values: what is printed, drawn, and written as JSON."""

from __future__ import annotations

from typing import Any

from app.planning.advice import Candidate
from app.planning.communication import list_collectives
from app.planning.deepspeed_states import states_by_deepspeed
from app.planning.host import estimate_disk, estimate_host_memory
from app.planning.memory import (
    GIB,
    PlannedRun,
    estimate_gpu_memory,
    fits,
    fits_host,
    usable_bytes,
)
from app.planning.simulation import Simulated
from app.planning.speed import batch_word, estimate_flops, estimate_speed


def describe_run(run: PlannedRun, tokens: int | None, tokens_by: str = "") -> dict[str, Any]:
    """Return a planned run's memory, messages and speed; `tokens`: that it trains on in all.

    `tokens_by`: what they are estimated by, or why they are not known.
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
        "deepspeed_states_gib": states_by_deepspeed(run),
        "disk_gib": disk_gib,
        "nvme_gib": hardware.nvme_gib,
        "fits_disk": not hardware.nvme_gib or disk_gib <= hardware.nvme_gib,
        "messages": _messages(run),
        "gflop_a_token": flops.total / 1e9,
        "step_seconds": speed.step,
        "seconds": {
            "products": speed.products,
            "attention": speed.attention,
            "traffic": speed.traffic,
            "messages": speed.messages,
            "host copies": speed.host,
            "waiting": speed.exposed,
        },
        "tokens_a_step": run.tokens_per_step,
        "tokens_per_second": speed.tokens_per_second,
        "tokens_per_second_a_gpu": speed.tokens_per_second / run.num_ranks,
        "mfu": speed.mfu,
        "verdict": speed.verdict,
        "batch": batch_word(run),
        "tokens_by": tokens_by,
        "simulated": None,
        **_hours_and_cost(run, tokens, speed.tokens_per_second),
    }


def _messages(run: PlannedRun) -> list[dict[str, Any]]:
    return [
        {
            "what": each.what,
            "kind": each.kind,
            "times": each.times,
            "gib_a_gpu": each.sent / GIB,
            "gib_between_nodes": each.sent_between_nodes / GIB,
        }
        for each in list_collectives(run, run.size)
    ]


def _hours_and_cost(
    run: PlannedRun, tokens: int | None, tokens_per_second: float
) -> dict[str, float | None]:
    """Return how long a training of `tokens` takes, and what it costs at the GPUs' price."""
    hours = None if tokens is None else tokens / tokens_per_second / 3600
    price = run.hardware.price_per_hour
    cost = None if hours is None or price is None else hours * price * run.num_ranks
    return {"tokens": tokens, "hours": hours, "cost": cost}


def _settings(run: PlannedRun) -> dict[str, Any]:
    return {
        "strategy": run.strategy.name,
        "quantization": run.quantization.method,
        "recompute": run.recompute,
        "precision": run.precision,
        "micro_batch_size": run.micro_batch_size,
        "sequence_len": run.sequence_len,
        "accumulation": run.accumulation,
    }


def describe_simulated(run: PlannedRun, found: Simulated) -> dict[str, Any]:
    """Return what a simulation found, beside what the arithmetic says of the same parts."""
    memory = estimate_gpu_memory(run)
    said = {name: size for name, size in memory.parts.items() if name != "overhead"}
    # A trace does not tell a loss, or a copy of a weight, from the other activations.
    said["activations"] = sum(said.pop(name, 0.0) for name in ("activations", "copies", "loss"))
    total, step = sum(said.values()), estimate_speed(run).step
    return {
        "gpu_gib": {name: size / GIB for name, size in found.parts.items()},
        "arithmetic_gib": {name: size / GIB for name, size in said.items() if size},
        "gpu_total_gib": found.total / GIB,
        "arithmetic_total_gib": total / GIB,
        "difference": total / found.total - 1,
        "phase": found.phase,
        "overhead_gib": memory.overhead / GIB,
        "compute_seconds": found.compute_seconds,
        "step_seconds": found.step_seconds,
        "step_difference": step / found.step_seconds - 1,
        "fits": found.total + memory.overhead <= usable_bytes(run.hardware),
    }


def describe_candidate(candidate: Candidate) -> dict[str, Any]:
    """Return one row of the advice."""
    run, memory = candidate.run, candidate.memory
    return _settings(run) | {
        "type": " ".join(candidate.words),
        "fits": candidate.fits,
        "gpu_gib": {name: value / GIB for name, value in memory.parts.items()},
        "gpu_total_gib": memory.total / GIB,
        "tokens_per_second": candidate.speed.tokens_per_second,
        "verdict": candidate.speed.verdict,
    }
