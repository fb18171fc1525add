"""Where metrics are logged: metrics.csv, TensorBoard events, and experiment trackers.

Trackers are Lightning's loggers for W&B and MLflow, isolated from the run: each runs in a separate
thread behind a queue, so that a tracker that fails or hangs neither stops nor slows the run: it is
abandoned with one warning. Trackers are offline, and write into the run's folder or its parent,
unless a key or a server is set in the environment. The id of the run in the tracker is saved in the
folder, so that a resumed run continues it.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import logging
import os
import queue
import re
import secrets
import threading
import time
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
_IDS_FILE = "trackers.json"
_PROJECT = "loft"
MAX_QUEUED = 10_000
"""queued calls beyond which a tracker is abandoned"""
_MAX_NAME_BYTES = 200
"""longest name of a metric in MLflow, whose own limits are 250 characters and a file's name"""
MAX_WAIT_SECONDS, MAX_WAIT_SECONDS_STOPPED = 20.0, 1.0
"""time that a finished run, and one that was stopped, waits for a tracker at its end"""
Build = Callable[[Path, str, "str | None"], Any]
"""builds Lightning's logger from a folder, and the name and id of a run (None for a new one)"""


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


def _build_wandb(folder: Path, name: str, run_id: str | None) -> Any:
    from lightning.pytorch.loggers import WandbLogger

    offline = not (os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE"))
    project = os.environ.get("WANDB_PROJECT", _PROJECT)
    wandb_id = run_id or secrets.token_hex(4)
    os.environ.setdefault("WANDB_SILENT", "true")
    os.environ.setdefault("WANDB_CONSOLE", "off")  # it would capture our console output
    # In the parent of the run's folder: W&B makes links, and a run folder with links is refused.
    save_dir = os.environ.get("WANDB_DIR", str(folder.parent))
    return WandbLogger(name=name, save_dir=save_dir, id=wandb_id, project=project, offline=offline)


def _build_mlflow(folder: Path, name: str, run_id: str | None) -> Any:
    from lightning.pytorch.loggers import MLFlowLogger

    # MLflow 3 has its file store behind this switch; a database would need one more package.
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    # We report an unreachable server once; MLflow would at each retry.
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
    return MLFlowLogger(
        experiment_name=os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT),
        run_name=name,
        run_id=run_id,
        tracking_uri=os.environ.get("MLFLOW_TRACKING_URI"),
        save_dir=str(folder / "mlruns"),
    )


_BUILDERS: dict[str, Build] = {"wandb": _build_wandb, "mlflow": _build_mlflow}


class Tracker(RunLogger):
    """Log metrics, settings and files to a tracker in a separate thread."""

    def __init__(
        self, kind: str, folder: Path, build: Build | None = None, *, details: bool = False
    ) -> None:
        super().__init__()
        self.kind, self.folder, self.details = kind, folder, details
        self._build = build or _BUILDERS[kind]
        self._queue: queue.Queue[Callable[[Any], None] | None] = queue.Queue(MAX_QUEUED)
        """calls of the tracker's thread; None ends it"""
        self._thread: threading.Thread | None = None
        self._is_abandoned = False

    @rank_zero_only
    def drop_rows_after(self, step: int | None) -> None:
        """Start a new run in the tracker if the run in this folder starts from step 0."""
        if step is None:
            (self.folder / _IDS_FILE).unlink(missing_ok=True)

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        row = metrics if self.details else {n: v for n, v in metrics.items() if not is_detail(n)}
        row = dict(row)
        if self.kind == "mlflow":
            self._enqueue(lambda logger: _log_to_mlflow(logger, row, step))
        else:
            self._enqueue(lambda logger: logger.log_metrics(row, step))

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Queue the settings; MLflow accepts those of a run only once."""
        if self.kind == "mlflow" and self._saved_id() is not None:
            return
        self._enqueue(lambda logger: logger.log_hyperparams(params))

    @rank_zero_only
    def finish(self, summary: RunSummary) -> None:
        """Queue the final metrics and files, and wait at most `MAX_WAIT_SECONDS` for the thread."""
        if self._thread is None:
            return
        attach = {"wandb": _attach_to_wandb, "mlflow": _attach_to_mlflow}.get(self.kind)
        if attach is not None:
            self._enqueue(lambda logger: attach(logger, summary.metrics, summary.files))
        status = "success" if summary.is_done else "failed"
        self._enqueue(lambda logger: logger.finalize(status))
        if self.kind == "wandb":
            self._enqueue(lambda logger: logger.experiment.finish(int(not summary.is_done)))
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        seconds = MAX_WAIT_SECONDS if summary.is_done else MAX_WAIT_SECONDS_STOPPED
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._abandon(f"it did not finish within {seconds:g} s")

    def _enqueue(self, call: Callable[[Any], None]) -> None:
        if self._is_abandoned:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self.kind, daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(call)
        except queue.Full:
            self._abandon(f"it is {MAX_QUEUED:,} rows behind")

    def _run(self) -> None:
        try:
            logger = self._build(self.folder, run_name(self.folder), self._saved_id())
            _ = logger.experiment  # creates the run, which has no id before
            ids = _read_ids(self.folder) | {self.kind: str(logger.version)}
            write_atomically(self.folder / _IDS_FILE, json.dumps(ids) + "\n")
            while (call := self._queue.get()) is not None and not self._is_abandoned:
                call(logger)
        except BaseException as error:  # noqa: BLE001  the run continues whatever a tracker raises
            self._abandon(str(error) or type(error).__name__)

    def _saved_id(self) -> str | None:
        run_id = _read_ids(self.folder).get(self.kind)
        return run_id if isinstance(run_id, str) else None

    def _abandon(self, reason: str) -> None:
        if not self._is_abandoned:
            self._is_abandoned = True
            first_line = next(iter(reason.splitlines()), "")
            log.warning(
                "logger=%s: %s; the run continues without it, metrics.csv has every row",
                self.kind,
                printable(redact(first_line)),
            )


def run_name(folder: Path) -> str:
    """Return the name of a run in a tracker: the last two parts of its folder."""
    return "/".join(folder.absolute().parts[-2:])


def _read_ids(folder: Path) -> dict[str, Any]:
    try:
        ids = json.loads((folder / _IDS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return ids if isinstance(ids, dict) else {}


def _log_to_mlflow(logger: Any, metrics: Mapping[str, float], step: int | None) -> None:
    """Log metrics under the names of `mlflow_names`.

    Lightning's logger would drop every letter that is not ASCII, by which names become equal.
    """
    from mlflow.entities import Metric

    now = int(time.time() * 1000)
    rows = [Metric(name, value, now, step or 0) for name, value in mlflow_names(metrics).items()]
    logger.experiment.log_batch(logger.run_id, metrics=rows)


def mlflow_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics with names that MLflow accepts; different names stay different.

    Its file store makes folders from names: `val/loss` becomes `val/loss/all`, next to
    `val/loss/a`.
    """
    totals = {
        name
        for name in metrics
        if name.endswith("/loss") or any(other.startswith(f"{name}/") for other in metrics)
    }
    return {
        f"{_mlflow_name(name)}/all" if name in totals else _mlflow_name(name): value
        for name, value in metrics.items()
    }


def _mlflow_name(name: str) -> str:
    """Return a name of letters, digits and `/_.- `; other characters become `_x` and their code."""
    # `_x` itself is replaced too, so that no other name looks like a replaced one; and a data set
    # with the name of the totals.
    found = r"_(?=x)|[^/\w.\- ]|(?<=/)a(?=ll$)"
    valid = re.sub(found, lambda match: f"_x{ord(match[0]):x}_", name)
    if len(valid.encode()) <= _MAX_NAME_BYTES:
        return valid
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    return valid.encode()[: _MAX_NAME_BYTES - 13].decode(errors="ignore") + f"-{digest}"


def _attach_to_wandb(logger: Any, metrics: Mapping[str, float], files: Sequence[Path]) -> None:
    logger.experiment.summary.update(dict(metrics))
    for file in files:
        logger.experiment.save(str(file), base_path=str(file.parent), policy="now")


def _attach_to_mlflow(logger: Any, metrics: Mapping[str, float], files: Sequence[Path]) -> None:
    final = {name: value for name, value in metrics.items() if not is_detail(name)}
    _log_to_mlflow(logger, {f"final/{name}": value for name, value in final.items()}, 0)
    for file in files:
        logger.experiment.log_artifact(logger.run_id, str(file))
