"""How ranks agree that a signal ends the run: between two steps, all of them after the same one.

A step whose data does not come never ends: that is noted here for the signals, too.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.profilers import PassThroughProfiler

from app.process.signals import signal_received, take_handlers, wait_for_data, wait_for_step


class Stopping:
    """Asks all ranks, once an optimizer step, whether a signal came to any of them.

    Alone a rank only looks at a number of its own. Several exchange four bytes between their hosts,
    for which no GPU waits.
    """

    def __init__(self) -> None:
        self._hosts: Any = None
        """the process group of the ranks' hosts; None for one rank"""

    def begin(self, trainer: L.Trainer) -> None:
        """Let signals wait for the end of a step from now on; called by all ranks."""
        if trainer.world_size > 1:
            import torch.distributed as dist

            self._hosts = dist.new_group(backend="gloo")
            # Lightning lets ranks wait for each other, and for their GPUs, at every micro-batch to
            # hear of a SIGTERM (its #21487); its handler would wait for them within the handler.
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
        take_handlers()
        wait_for_step(True)

    def agreed(self) -> int | None:
        """Return the signal that ends the run after this step, on all ranks or on none."""
        signum = signal_received()
        if self._hosts is None:
            return signum
        highest = torch.tensor([signum or 0], dtype=torch.int32)
        torch.distributed.all_reduce(highest, torch.distributed.ReduceOp.MAX, group=self._hosts)
        return int(highest) or None

    def end(self, trainer: L.Trainer) -> None:
        """Let signals end the program where it stands again, where something is left to do."""
        if trainer.is_global_zero:
            wait_for_step(False)


class FetchWatch(PassThroughProfiler):
    """Notes when the training loop waits for a batch: Lightning tells its profiler alone."""

    def start(self, action_name: str) -> None:
        """Note that a batch is waited for."""
        if action_name.endswith("_next"):
            wait_for_data(True)

    def stop(self, action_name: str) -> None:
        """Note that it has come."""
        if action_name.endswith("_next"):
            wait_for_data(False)
