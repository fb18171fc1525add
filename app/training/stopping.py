"""Stop all ranks after the same optimizer step when any of them has received a signal.

Signals also learn here whether the loop waits for data, since such a step may never end.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.profilers import PassThroughProfiler

from app.process.signals import signal_received, take_handlers, wait_for_data, wait_for_step
from app.training.machine import WaitClock


class Stopping:
    """Ask once per optimizer step whether any rank has received a signal.

    Several ranks exchange four bytes between their hosts, for which no GPU waits.
    """

    def __init__(self) -> None:
        self._hosts: Any = None
        """a gloo process group; None for one rank"""

    def begin(self, trainer: L.Trainer) -> None:
        """Defer signals to the end of a step from now on; all ranks call it."""
        if trainer.world_size > 1:
            import torch.distributed as dist

            self._hosts = dist.new_group(backend="gloo")
            # Private, tried with Lightning 2.6: it synchronizes ranks and GPUs at every micro-batch
            # to broadcast a SIGTERM (its #21487), and offers no switch.
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
        take_handlers()
        wait_for_step(True)

    def agreed(self) -> int | None:
        """Return the signal that ends the run after this step, the same on all ranks, or None."""
        signum = signal_received()
        if self._hosts is None:
            return signum
        highest = torch.tensor([signum or 0], dtype=torch.int32)
        torch.distributed.all_reduce(highest, torch.distributed.ReduceOp.MAX, group=self._hosts)
        return int(highest) or None

    def end(self, trainer: L.Trainer) -> None:
        """Let signals end the process at once again, on the rank that still has work to do."""
        if trainer.is_global_zero:
            wait_for_step(False)


class FetchWatch(PassThroughProfiler):
    """Tell the signal handlers when the training loop waits for a batch.

    A profiler, since Lightning has no hook around the fetch of a batch. `clock` adds up how long
    training waited; a validation's batches count neither there nor as training time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clock = WaitClock()

    def start(self, action_name: str) -> None:
        """Mark the start of a fetch."""
        if action_name.endswith("_next"):
            wait_for_data(True)
            if "train" in action_name:
                self.clock.start()

    def stop(self, action_name: str) -> None:
        """Mark the end of a fetch."""
        if action_name.endswith("_next"):
            self.clock.stop()
            wait_for_data(False)
