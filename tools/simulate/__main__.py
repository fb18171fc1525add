"""Compare a simulated step with the estimates of its plan: `python -m tools.simulate WORDS`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from app.config import PlanConfig, load_config, settings_of
from app.plan import HUES, find_hardware
from app.planning.memory import PlannedRun, estimate_gpu_memory, usable_bytes
from app.planning.planned import load_strategies, on_hardware, plan_run, read_config_json
from app.planning.speed import estimate_speed
from common.errors import USER_ERROR, UserError
from common.text import percent
from tools.simulate import SimulatedStep, check_simulated, simulate

GIB = 2**30


def compare(*words: str) -> dict[str, Any]:
    """Simulate a step of the plan that `words` describe; return it beside the estimates."""
    config = load_config("plan", words)
    assert isinstance(config, PlanConfig)
    hardware = on_hardware(config, find_hardware(config.hardware))
    strategies = load_strategies(settings_of)
    run, _ = plan_run(config, hardware, read_config_json(config.model), strategies=strategies)
    check_simulated(config, run)
    return describe_simulated(run, simulate(config, run))


def describe_simulated(run: PlannedRun, simulated: SimulatedStep) -> dict[str, Any]:
    """Return the results of a simulation, with the estimates of the same parts."""
    memory = estimate_gpu_memory(run)
    estimated = {name: size for name, size in memory.parts.items() if name != "overhead"}
    # The simulation counts the loss, and copies of weights, as activations.
    estimated["activations"] = sum(
        estimated.pop(name, 0.0) for name in ("activations", "copies", "loss")
    )
    total, step = sum(estimated.values()), estimate_speed(run).step
    return {
        "gpu_gib": {name: size / GIB for name, size in simulated.parts.items()},
        "arithmetic_gib": {name: size / GIB for name, size in estimated.items() if size},
        "gpu_total_gib": simulated.total / GIB,
        "arithmetic_total_gib": total / GIB,
        "difference": total / simulated.total - 1,
        "phase": simulated.phase,
        "overhead_gib": memory.overhead / GIB,
        "compute_seconds": simulated.compute_seconds,
        "step_seconds": simulated.step_seconds,
        "step_difference": step / simulated.step_seconds - 1,
        "fits": simulated.total + memory.overhead <= usable_bytes(run.hardware),
    }


def lines_of(found: Mapping[str, Any]) -> list[str]:
    """Return the lines that compare a simulated step with the estimates."""
    verdict = "fits" if found["fits"] else "DOES NOT FIT"
    traced, estimated = found["gpu_gib"], found["arithmetic_gib"]
    return [
        f"simulated step, {verdict}: {found['gpu_total_gib']:.2f} GiB in the {found['phase']} "
        f"phase, plus {found['overhead_gib']:.1f} for CUDA itself",
        f"  {'':<12}{'simulated':>10}{'estimated':>12}",
        *(
            f"  {name:<12}{traced.get(name, 0.0):10.2f}{estimated.get(name, 0.0):12.2f} GiB"
            for name in HUES
            if name in traced or name in estimated
        ),
        f"  {'total':<12}{found['gpu_total_gib']:10.2f}{found['arithmetic_total_gib']:12.2f} GiB: "
        f"the estimate is {percent(found['difference'], sign='+')}",
        f"  a step: {found['step_seconds']:.2f} s, of which {found['compute_seconds']:.2f} for its "
        "kernels and the rest for the estimated communication; the estimate is "
        f"{percent(found['step_difference'], 0, sign='+')}",
    ]


def main(words: list[str]) -> int:
    """Print the comparison, and a JSON line of it."""
    try:
        found = compare(*words)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    print("\n".join(lines_of(found)))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
