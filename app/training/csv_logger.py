"""metrics.csv: one row an optimizer step, one row a validation, full precision."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from app.process.files import open_no_follow
from app.training.checkpoint.disk import NO_ROOM, SaveError, free_bytes, in_units


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
