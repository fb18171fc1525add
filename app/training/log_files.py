"""The files that metrics are logged to: metrics.csv and TensorBoard events."""

from __future__ import annotations

import csv
import io
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from app.process.launch import resume_words
from app.training.checkpoint.disk import DISK_FULL, SaveError, describe_shortage
from common.files import open_no_follow, write_atomically
from common.installation import typed_words
from common.redaction import redact
from common.text import printable

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    metrics: Mapping[str, float] = field(default_factory=dict)
    """metrics of the whole run"""
    settings: Sequence[tuple[str, str, str]] = ()
    """key, value and default of each setting that differs from its default"""
    files: Sequence[Path] = ()
    """files that a tracker attaches"""
    is_done: bool = True


def is_detail(name: str) -> bool:
    """Return whether a metric is rarely needed: tokens and shares of data sets, expert load."""
    return any(part in name for part in ("/tokens/", "/share/", "experts/"))


def columns(dataset_names: list[str]) -> list[str]:
    """Return the columns of metrics.csv for these data sets."""
    by_dataset = [
        f"{phase}/{metric}/{name}"
        for phase in ("train", "val")
        for metric in ("loss", "tokens", "share")
        for name in dataset_names
    ]
    rest = ["train/lr", "train/grad_norm", "speed/tokens_per_second"]
    return ["step", "train/loss", "val/loss", *by_dataset, *rest]


class RunLogger(Logger):
    """What the loggers of a run have in common: settings are in config.yaml, names are fixed."""

    kind = ""

    @property
    def name(self) -> str:
        return self.kind

    @property
    def version(self) -> str:
        """Empty: a run has one file or folder of a logger, and a tracker has its own run ids."""
        return ""

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def drop_rows_after(self, step: int | None) -> None:
        """Drop what follows `step`, from which the run resumes; None: everything. Here nothing."""

    def finish(self, summary: RunSummary) -> None:
        """Log the final metrics and files, and close the logger: here nothing."""


class CsvLogger(RunLogger):
    """Write metrics.csv: a row per optimizer step and per validation, at full precision."""

    kind = "csv"

    def __init__(self, path: Path, dataset_names: list[str]) -> None:
        super().__init__()
        self.path = path
        self.columns = columns(dataset_names)
        self._has_all_columns = False

    @rank_zero_only
    def drop_rows_after(self, step: int | None) -> None:
        """Drop the rows after `step` and a truncated last row; None: the file."""
        if step is None or not self.path.exists():
            self.path.unlink(missing_ok=True)  # an earlier run may have other columns
            return
        end = 0
        with open_no_follow(self.path, "r+b") as file:
            for number, line in enumerate(file):
                first = line.split(b",", 1)[0]
                is_whole = line.endswith(b"\n")
                is_step = re.fullmatch(rb"\d{1,15}", first) is not None
                if not is_whole or (number and not (is_step and int(first) <= step)):
                    break
                end += len(line)
            file.truncate(end)

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Append one row, after the header in a new file; SaveError if it cannot be written."""
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self.columns)
        try:
            if not self.path.exists() or not self.path.stat().st_size:
                writer.writeheader()
            elif not self._has_all_columns:
                writer.fieldnames = self.columns = self._add_missing_columns()
            self._has_all_columns = True
            writer.writerow({"step": step} | metrics)
            with open_no_follow(self.path, "a", newline="") as file:
                file.write(text.getvalue())
        except OSError as error:
            raise SaveError(self._describe(error, text.tell())) from error

    def _add_missing_columns(self) -> list[str]:
        """Add the columns that an existing file lacks, and return all of its columns.

        The run may have started without a GPU, or without tasks to measure.
        """
        with open_no_follow(self.path, "r", newline="") as file:
            header, *rows = csv.reader(file)
        missing = [name for name in self.columns if name not in header]
        if missing:
            text = io.StringIO(newline="")
            csv.writer(text).writerows(
                [header + missing, *(row + [""] * len(missing) for row in rows)]
            )
            write_atomically(self.path, text.getvalue())
        return header + missing

    @rank_zero_only
    def save(self) -> None:
        """Sync the rows to the disk, before a checkpoint is committed; SaveError if it fails."""
        if not self.path.exists():
            return
        try:
            with self.path.open("rb") as file:
                os.fsync(file.fileno())
        except OSError as error:
            raise SaveError(self._describe(error, self.path.stat().st_size)) from error

    def _describe(self, error: OSError, num_bytes: int) -> str:
        message = f"{self.path} could not be written: {error.strerror}"
        if error.errno not in DISK_FULL:
            return message
        folder = self.path.parent
        return (
            f"{message}; {describe_shortage(folder, f'{num_bytes:,} bytes')}; free disk space, "
            f"then type {resume_words(folder)}"
        )


class TensorBoardLogger(RunLogger):
    """Write TensorBoard event files, opened at the first row.

    Lightning's own logger imports tensorboard before training. Events after `last_step`, from which
    the run resumes, are hidden. After a disk error, logging to TensorBoard stops with a warning and
    the run continues: metrics.csv has every row. "Custom scalars" shows training and validation of
    a data set in one chart, "text" the command and config.yaml, "hparams" the settings with the
    final metrics.
    """

    kind = "tensorboard"

    def __init__(
        self,
        folder: Path,
        dataset_names: Sequence[str] = (),
        *,
        last_step: int | None = None,
        details: bool = False,
    ) -> None:
        super().__init__()
        self.folder, self.dataset_names, self.details = folder, dataset_names, details
        self._next_step = 0 if last_step is None else last_step + 1
        self._writer: Any = None
        self._has_failed = False

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self._guarded(lambda: self._write(metrics, step))

    @rank_zero_only
    def save(self) -> None:
        if self._writer is not None:
            self._guarded(self._writer.flush)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Flush the events; more follow when the run is evaluated."""
        self.save()

    @rank_zero_only
    def finish(self, summary: RunSummary) -> None:
        """Write the settings with the final metrics, and close the file."""
        if self._writer is None:
            return
        if summary.metrics:
            self._guarded(lambda: self._write_hparams(summary))
        self._guarded(self._writer.close)

    def _write_hparams(self, summary: RunSummary) -> None:
        from torch.utils.tensorboard.summary import hparams

        settings = {key: value for key, value, _ in summary.settings}
        final_metrics = {
            f"final/{name}": value
            for name, value in summary.metrics.items()
            if not is_detail(name) and "trained_tokens" not in name
        }
        # Not `add_hparams`, which would create a separate run next to this one.
        for summary in hparams(settings, final_metrics):
            self._writer.file_writer.add_summary(summary)
        for name, value in final_metrics.items():
            self._writer.add_scalar(name, value)

    def _write_texts(self) -> None:
        lines = {"loss": ["Multiline", ["train/loss$", "val/loss$"]]} | {
            name: ["Multiline", [f"{phase}/loss/{re.escape(name)}$" for phase in ("train", "val")]]
            for name in self.dataset_names
        }
        self._writer.add_custom_scalars({"loss": lines})
        command = " ".join(typed_words())
        self._writer.add_text("command", f"```\n{printable(redact(command))}\n```")
        config = self.folder.parent / "config.yaml"
        if config.is_file():
            self._writer.add_text("config", f"```yaml\n{config.read_text(encoding='utf-8')}\n```")

    def _write(self, metrics: dict[str, float], step: int | None) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # TensorBoard hides events of earlier files from this step on.
            purge_step = self._next_step if self.folder.exists() else None
            self._writer = SummaryWriter(str(self.folder), purge_step=purge_step)
            self._write_texts()
        for name, value in metrics.items():
            if self.details or not is_detail(name):
                self._writer.add_scalar(name, value, step)

    def _guarded(self, write: Callable[[], None]) -> None:
        if self._has_failed:
            return
        try:
            write()
        except OSError as error:
            self._has_failed = True
            log.warning(
                "TensorBoard: %s could not be written: %s; logging continues in metrics.csv only",
                self.folder,
                error.strerror or error,
            )
