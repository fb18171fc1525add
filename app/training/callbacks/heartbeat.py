"""Report heartbeats of each rank to the supervisor or to the other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L

from app.process.heartbeat import ENDED, send_heartbeat, send_to_supervisor, start_heartbeat
from app.process.peers import Peers, start_peers


class Heartbeat(L.Callback):
    """Send a heartbeat with every micro-batch of training and validation."""

    def __init__(self, folder: Path, peers: Peers | None = None) -> None:
        """`peers`: checks the other ranks if no supervisor does; they are connected by `setup`."""
        self.folder = folder
        self.peers = peers

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        """Start to watch the other ranks before the weights are loaded."""
        if self.peers is not None:
            start_peers(self.peers)

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Start before the first validation."""
        self._start(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Start in a resumed run, which has no validation before its first step.

        Pauses only count from the first heartbeat on, and none is sent here: a stream may take long
        to reach the step at which the run resumes.
        """
        self._start(trainer)

    def _start(self, trainer: L.Trainer) -> None:
        if self.peers is None:
            start_heartbeat(self.folder, trainer.global_rank)

    def on_validation_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Send a heartbeat."""
        send_heartbeat(trainer.global_step)

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        """Send a heartbeat before a step that may hang."""
        send_heartbeat(trainer.global_step)

    def on_after_backward(self, trainer: L.Trainer, *args: Any) -> None:
        """Send a heartbeat after each micro-batch."""
        send_heartbeat(trainer.global_step)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Send a heartbeat."""
        send_heartbeat(trainer.global_step)
        if self.peers is not None:
            self.peers.mark_trained()

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Let `exception` end this rank: writing the run's report and loggers may take long."""
        if self.peers is not None:
            self.peers.mark_failed()

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Stop: no steps follow."""
        send_to_supervisor(ENDED)
        if self.peers is not None:
            self.peers.mark_done()
