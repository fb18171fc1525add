"""Where the curves go: metrics.csv always, TensorBoard beside it."""

from __future__ import annotations

import csv
import io
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from app.process.untrusted import open_no_follow
from app.training.checkpoint.disk import NO_ROOM, SaveError, free_bytes, in_units

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger


def columns(dataset_names: list[str]) -> list[str]:
    """Name the columns of metrics.csv for these data sets."""
    by_dataset = [
        f"{phase}/{what}/{name}"
        for phase in ("train", "val")
        for what in ("loss", "tokens", "share")
        for name in dataset_names
    ]
    rest = ["train/lr", "train/grad_norm", "speed/tokens_per_second"]
    return ["step", "train/loss", "val/loss", *by_dataset, *rest]


class CsvLogger(Logger):
    """Append rows to a csv file whose columns are known from the start."""

    def __init__(self, path: Path, dataset_names: list[str]) -> None:
        super().__init__()
        self.path = path
        self.columns = columns(dataset_names)

    @rank_zero_only
    def begin_anew(self) -> None:
        """Drop what another run wrote, its columns as well."""
        self.path.unlink(missing_ok=True)

    @rank_zero_only
    def cut_after(self, step: int) -> None:
        """Drop what a run wrote after `step`, from which it goes on; a cut-off row goes, too."""
        if not self.path.exists():
            return
        end = 0
        with open_no_follow(self.path, "r+b") as file:
            for number, line in enumerate(file):
                first = line.split(b",", 1)[0]
                is_whole = line.endswith(b"\n")
                if not is_whole or (number and not (first.isdigit() and int(first) <= step)):
                    break
                end += len(line)
            file.truncate(end)

    @property
    def name(self) -> str:
        """Name of this logger."""
        return "csv"

    @property
    def version(self) -> str:
        """A run has one file, so there are no versions."""
        return ""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Append one row; the header first when the file is new. SaveError where it cannot."""
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self.columns)
        try:
            if not self.path.exists() or not self.path.stat().st_size:
                writer.writeheader()
            writer.writerow({"step": step} | metrics)
            with open_no_follow(self.path, "a", newline="") as file:
                file.write(text.getvalue())
        except OSError as error:
            raise SaveError(self._in_words(error, text.tell())) from error

    @rank_zero_only
    def save(self) -> None:
        """Bring the rows to the disk, so that no checkpoint is there without them.

        SaveError where it cannot.
        """
        if not self.path.exists():
            return
        try:
            with self.path.open("rb") as file:
                os.fsync(file.fileno())
        except OSError as error:
            raise SaveError(self._in_words(error, self.path.stat().st_size)) from error

    def _in_words(self, error: OSError, num_bytes: int) -> str:
        what = f"{self.path} could not be written: {error.strerror}"
        if error.errno not in NO_ROOM:
            return what
        folder = self.path.parent
        return (
            f"{what}; it needs {num_bytes:,} bytes, {in_units(free_bytes(folder))} are free; "
            f"make room, and go on by resume={folder}"
        )

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Settings stand in config.yaml."""


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


NAMES = ("tensorboard", "csv")


@dataclass(kw_only=True, slots=True)
class LoggerConfig:
    name: str = "tensorboard"
    """tensorboard: event files beside metrics.csv; csv: metrics.csv alone"""


def build_loggers(
    config: LoggerConfig, folder: Path, dataset_names: list[str], *, last_step: int | None = None
) -> list[Logger]:
    """Build the loggers of a run that writes into `folder`, and goes on from `last_step` or anew.

    They change nothing that is there: `drop_rows_after` does, when the run takes its folder.
    """

    loggers: list[Logger] = [CsvLogger(folder / "metrics.csv", dataset_names)]
    if config.name == "tensorboard":
        loggers.append(TensorBoardLogger(folder / "tensorboard", last_step=last_step))
    return loggers


def drop_rows_after(last_step: int | None, loggers: list[Logger]) -> None:
    """Keep the rows of metrics.csv up to `last_step`, from which the run goes on; None: no row.

    TensorBoard hides its own when the first new one comes.
    """

    (rows,) = (logger for logger in loggers if isinstance(logger, CsvLogger))
    if last_step is None:
        rows.begin_anew()
    else:
        rows.cut_after(last_step)
