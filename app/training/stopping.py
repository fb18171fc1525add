"""Stop all ranks after the same optimizer step when any of them has received a signal.

The signal handlers are also told when the loop waits for data, since such a step may never end.
"""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import torch
from lightning.pytorch.profilers import PassThroughProfiler

from app.process.signals import (
    defer_signals,
    mark_waiting_for_data,
    restore_handlers,
    signal_received,
)


class SignalSync:
    """Check once per optimizer step whether any rank has received a signal.

    The ranks exchange four bytes between their hosts; no GPU waits for them.
    """

    def __init__(self) -> None:
        self._hosts: Any = None
        """a gloo process group; None with a single rank"""

    def start(self, trainer: L.Trainer) -> None:
        """Defer signals to the end of a step from now on; all ranks must call this."""
        if trainer.world_size > 1:
            import torch.distributed as dist

            self._hosts = dist.new_group(backend="gloo")
            # Private API, tested with Lightning 2.6: it synchronizes ranks and GPUs at every
            # micro-batch to broadcast a SIGTERM (its #21487), and cannot be switched off.
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
        restore_handlers()
        defer_signals(True)

    def poll(self) -> int | None:
        """Return the signal that ends the run after this step, the same on all ranks, or None."""
        signum = signal_received()
        if self._hosts is None:
            return signum
        highest = torch.tensor([signum or 0], dtype=torch.int32)
        torch.distributed.all_reduce(highest, torch.distributed.ReduceOp.MAX, group=self._hosts)
        return int(highest) or None

    def end(self, trainer: L.Trainer) -> None:
        """Let signals end rank 0, which still has work to do, at once again."""
        if trainer.is_global_zero:
            defer_signals(False)


class FetchProfiler(PassThroughProfiler):
    """Measure how long training waits for batches, and tell the signal handlers when it waits.

    A profiler, because Lightning has no hook around the fetch of a batch. Fetches of validation
    batches are not counted, as validations are not counted as training time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        """time that the training loop has waited for batches so far"""
        self._fetch_started: float | None = None

    def start(self, action_name: str) -> None:
        if action_name.endswith("_next"):
            mark_waiting_for_data(True)
            if "train" in action_name:
                self._fetch_started = time.perf_counter()

    def stop(self, action_name: str) -> None:
        if action_name.endswith("_next"):
            if self._fetch_started is not None:
                self.seconds += time.perf_counter() - self._fetch_started
                self._fetch_started = None
            mark_waiting_for_data(False)
