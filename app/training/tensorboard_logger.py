"""TensorBoard event files, opened when the first row comes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only


class TensorBoardLogger(Logger):
    """Write scalars for TensorBoard.

    Lightning's own logger imports tensorboard before training; this one when it first writes. What
    is in the folder is shown up to `last_step`, from which the run goes on.
    """

    def __init__(self, folder: Path, *, last_step: int | None = None) -> None:
        super().__init__()
        self.folder = folder
        # TensorBoard hides what earlier files have from this step on.
        next_step = 0 if last_step is None else last_step + 1
        self._purge_step = next_step if folder.exists() else None
        self._writer: Any = None

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
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.folder), purge_step=self._purge_step)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    @rank_zero_only
    def save(self) -> None:
        """Write what waits in memory."""
        if self._writer is not None:
            self._writer.flush()

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Settings stand in config.yaml."""

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
