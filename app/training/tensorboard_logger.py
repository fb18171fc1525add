"""TensorBoard event files, opened when the first row comes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

log = logging.getLogger(__name__)


class TensorBoardLogger(Logger):
    """Write scalars for TensorBoard.

    Lightning's own logger imports tensorboard before training; this one when it first writes. What
    is in the folder is shown up to `last_step`, from which the run goes on. A disk that fails ends
    these curves with a warning and not the run: metrics.csv has them all.
    """

    def __init__(self, folder: Path, *, last_step: int | None = None) -> None:
        super().__init__()
        self.folder = folder
        self._next_step = 0 if last_step is None else last_step + 1
        self._writer: Any = None
        self._has_failed = False

    @property
    def name(self) -> str:
        """Name of this logger."""
        return "tensorboard"

    @property
    def version(self) -> str:
        """A run has one folder of events, so there are no versions."""
        return ""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Write one scalar a metric."""
        self._unless_it_fails(lambda: self._write(metrics, step))

    @rank_zero_only
    def save(self) -> None:
        """Write what waits in memory."""
        if self._writer is not None:
            self._unless_it_fails(self._writer.flush)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Settings stand in config.yaml."""

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Close the file."""
        if self._writer is not None:
            self._unless_it_fails(self._writer.close)

    def _write(self, metrics: dict[str, float], step: int | None) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # TensorBoard hides what earlier files have from this step on.
            purge_step = self._next_step if self.folder.exists() else None
            self._writer = SummaryWriter(str(self.folder), purge_step=purge_step)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def _unless_it_fails(self, act: Callable[[], None]) -> None:
        if self._has_failed:
            return
        try:
            act()
        except OSError as error:
            self._has_failed = True
            log.warning(
                "TensorBoard: %s could not be written: %s; its curves end, metrics.csv goes on",
                self.folder,
                error.strerror or error,
            )
