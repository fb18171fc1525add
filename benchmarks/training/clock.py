"""Seconds, tokens, losses and memory of one training, as every system's script reports them."""

from __future__ import annotations

import json
import os
import resource
import time
from dataclasses import dataclass, field

now = time.process_time if os.environ["OMP_NUM_THREADS"] == "1" else time.perf_counter
"""CPU seconds for one thread, since others may use the machine; wall seconds for several"""


@dataclass
class Clock:
    """End times of steps in seconds, and the tokens of each."""

    warm_up: int
    ends: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_gb: float = 0.0

    def step(self) -> None:
        """Record the end of a step, and the most memory until then."""
        self.ends.append(now())
        self.peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9

    def report(self, micro_batches: int = 1) -> None:
        """Print a JSON line: tokens per second, mean loss of the measured steps, peak GB.

        `micro_batches`: elements of `tokens` that belong to a step.
        """
        first, number = self.warm_up, len(self.ends)
        seconds = self.ends[-1] - self.ends[first - 1]
        tokens = sum(self.tokens[first * micro_batches : number * micro_batches])
        measured = {
            "tokens_per_second": tokens / seconds,
            "tokens_per_step": tokens / (number - first),
            "loss": sum(self.losses[first:]) / len(self.losses[first:]),
            "peak_gb": self.peak_gb,
        }
        print(json.dumps(measured))
