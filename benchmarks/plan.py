"""The planner's time, and its error compared with measured peaks on this machine.

And the simulation of 70B on 64 GPUs: its time, its memory, and the arithmetic beside it. Times are
compared with bare imports of the heavy libraries, measured in the same run.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.bare_imports import seconds_to_import
from benchmarks.figure import Figure
from benchmarks.planning.tracked import compare
from tools.simulate.device import find_obstacle

WORDS = ("+experiment=llama70b", "hardware=8xa100_80gb")
SIMULATED = ("+experiment=llama70b", "hardware=8x8xh100", "trainer.global_batch_size=64")
RUNS = 3
ROOT = Path(__file__).resolve().parents[1]


def measure() -> list[Figure]:
    """Return the times of the command, and the errors of the memory estimate."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        # First, as its memory is the highest of all child processes until then.
        simulated = _simulate()
        rounds = [
            _seconds(WORDS, folder / f"plan-{number}") / seconds_to_import()
            for number in range(RUNS)
        ]
    errors = [each.error for each in compare()]
    sizes = [abs(error) for error in errors]
    return [
        *simulated,
        Figure(figure="plan/with_advice_of_bare_imports", value=statistics.median(rounds), bar=0.6),
        Figure(figure="plan/memory_error_median", value=statistics.median(sizes), bar=0.03),
        Figure(figure="plan/memory_error_worst", value=max(sizes), bar=0.08),
        Figure(figure="plan/memory_promised_too_low", value=max(0.0, -min(errors)), bar=0.08),
    ]


def _simulate() -> list[Figure]:
    """Return time and memory of simulating 64 ranks, and the estimate's difference from it."""
    if obstacle := find_obstacle():
        print(f"plan: simulation skipped: {obstacle}")
        return []
    start = time.perf_counter()
    command = [sys.executable, "-m", "tools.simulate", *SIMULATED]
    said = subprocess.run(command, check=True, capture_output=True, cwd=ROOT, text=True).stdout
    seconds = time.perf_counter() - start
    largest_gib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    imports = statistics.median(seconds_to_import() for _ in range(RUNS))
    found = json.loads(said.splitlines()[-1])
    return [
        Figure(figure="plan/simulation_of_bare_imports", value=seconds / imports, bar=36.0),
        Figure(figure="plan/simulation_gib", value=largest_gib, bar=8.0),
        Figure(figure="plan/simulation_difference", value=abs(found["difference"]), bar=0.05),
    ]


def _seconds(words: Sequence[str], folder: Path) -> float:
    start = time.perf_counter()
    command = [sys.executable, "-m", "app.plan", *words, f"output.dir={folder}"]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    return time.perf_counter() - start
