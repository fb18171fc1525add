"""A plan's time, and its arithmetic beside peaks that are measured on this machine."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.figure import Figure
from benchmarks.planning.tracked import compare

WORDS = ("+experiment=llama70b", "hardware=8xa100_80gb")
RUNS = 3
ROOT = Path(__file__).resolve().parents[1]


def measure() -> list[Figure]:
    """Return seconds of the command with its advice, and errors of the arithmetic of memory."""
    with tempfile.TemporaryDirectory() as folder:
        seconds = min(_seconds(folder) for _ in range(RUNS))
    errors = [each.error for each in compare()]
    sizes = [abs(error) for error in errors]
    return [
        Figure(figure="plan/seconds_with_advice", value=seconds, bar=3.0),
        Figure(figure="plan/memory_error_median", value=statistics.median(sizes), bar=0.03),
        Figure(figure="plan/memory_error_worst", value=max(sizes), bar=0.08),
        Figure(figure="plan/memory_promised_too_low", value=max(0.0, -min(errors)), bar=0.08),
    ]


def _seconds(folder: str) -> float:
    start = time.perf_counter()
    command = [sys.executable, "-m", "app.plan", *WORDS, f"output.dir={folder}/plan"]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    return time.perf_counter() - start
