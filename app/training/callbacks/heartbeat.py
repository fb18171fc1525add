"""Heartbeats of every rank, for the supervisor or for the other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L

from app.process.heartbeat import ENDED, beat, send_to_supervisor, start_heartbeat
from app.process.peers import Peers, start_peers


class Heartbeat(L.Callback):
    """Beat with every micro-batch, of training and of validation."""

    def __init__(self, folder: Path, peers: Peers | None = None) -> None:
        """Watch `peers` where no supervisor watches; the ranks have met by `setup`."""
        self.folder = folder
        self.peers = peers

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        """Begin to watch the others before the weights are read."""
        if self.peers is not None:
            start_peers(self.peers)

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Start before the first validation."""
        self._start(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Begin where a resumed run has no first validation.

        Without a beat, from which on pauses count: a stream is read up to its step before a batch.
        """
        self._start(trainer)

    def _start(self, trainer: L.Trainer) -> None:
        if self.peers is None:
            start_heartbeat(self.folder, trainer.global_rank)

    def on_validation_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Beat."""
        beat(trainer.global_step)

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        """Beat before what may never return."""
        beat(trainer.global_step)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Beat."""
        beat(trainer.global_step)
        if self.peers is not None:
            self.peers.mark_trained()

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Leave the end to `exception`: the page and the loggers of the run may take long."""
        if self.peers is not None:
            self.peers.mark_failed()

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Stop: what follows has no steps."""
        send_to_supervisor(ENDED)
        if self.peers is not None:
            self.peers.mark_done()
