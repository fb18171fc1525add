"""Measurements of one run: tokens per second, memory, and time by part of a step."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from typing import Any

KINDS = {
    "attention": r"flash|fmha|attention|sdpa",
    "products": r"gemm|gemv|nvjet|cutlass|cublas|xmma|aten::(add|b)?mm",
    "dequantizing": r"dequant",
    "copies": r"memcpy|memset",
}
"""kinds of kernels by a part of their name; the first match counts; all others are `other`"""


class Clock:
    """Timestamps within steps on the device's own timeline, without synchronization.

    Steps before `warm_up` are not counted, then `steps` are measured, and one more is profiled.
    """

    def __init__(self, device: str, warm_up: int, steps: int) -> None:
        import torch

        self.on_gpu = device == "cuda"
        self.first, self.last = warm_up, warm_up + steps
        self.steps_done = self.tokens = 0
        self.seconds = 0.0
        self.started: float | None = None
        self.peak_gib: float | None = None
        self.marks: list[tuple[str, Any]] = []
        self.kinds: dict[str, float] = {}
        self.profiler: Any = None
        self.torch = torch

    @property
    def is_measuring(self) -> bool:
        return self.first <= self.steps_done < self.last

    def mark(self, ends: str) -> None:
        """Record that part `ends` has just been queued on the device."""
        if not self.is_measuring:
            return
        if self.on_gpu:
            event = self.torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((ends, event))
        else:
            self.marks.append((ends, time.perf_counter()))

    def micro_batch_done(self, num_tokens: int) -> None:
        """Count the tokens of a micro-batch."""
        self.tokens += num_tokens * self.is_measuring

    def start(self) -> None:
        """Start measuring if there is no warm-up; call before the first step."""
        self._cross_border()

    def step_done(self) -> None:
        """Count an optimizer step; synchronizes only before and after the measured steps.

        Peak memory is that of the warm-up and the measured steps.
        """
        self.steps_done += 1
        self._cross_border()

    def _cross_border(self) -> None:
        if self.steps_done not in (self.first, self.last, self.last + 1):
            return
        if self.on_gpu:
            self.torch.cuda.synchronize()
        now = time.perf_counter()
        if self.steps_done == self.first:
            self.started = now
            self.mark("start")
        elif self.steps_done == self.last:
            assert self.started is not None
            self.seconds = now - self.started
            if self.on_gpu:
                self.peak_gib = self.torch.cuda.max_memory_allocated() / 2**30
            self._start_profiler()
        elif self.profiler is not None:
            self.profiler.__exit__(None, None, None)
            self.kinds = self._by_kind(self.profiler)
            self.profiler = None

    def milliseconds_per_step(self) -> dict[str, float]:
        """Return the time of a measured step by part, in order."""
        spans: dict[str, float] = defaultdict(float)
        steps = self.last - self.first
        for (_, before), (ended, after) in zip(self.marks, self.marks[1:], strict=False):
            span = before.elapsed_time(after) if self.on_gpu else 1000 * (after - before)
            spans[ended] += span / steps
        return dict(spans)

    def _start_profiler(self) -> None:
        profiler = self.torch.profiler
        activity = profiler.ProfilerActivity.CUDA if self.on_gpu else profiler.ProfilerActivity.CPU
        self.profiler = profiler.profile(activities=[activity], acc_events=True)
        self.profiler.__enter__()

    def _by_kind(self, profiler: Any) -> dict[str, float]:
        """Return the milliseconds of kernels in the profiled step, by kind."""
        found = dict.fromkeys((*KINDS, "other"), 0.0)
        kind_of_device = "CUDA" if self.on_gpu else "CPU"
        for event in profiler.key_averages():
            if event.device_type.name != kind_of_device or event.is_user_annotation:
                continue
            spent = event.self_device_time_total if self.on_gpu else event.self_cpu_time_total
            name = event.key.lower()
            kind = next((kind for kind, words in KINDS.items() if re.search(words, name)), "other")
            found[kind] += spent / 1000
        return found
