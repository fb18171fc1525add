"""Experiment trackers: Lightning's loggers for W&B and MLflow, isolated from the run.

Each runs in a separate thread behind a queue, so that a tracker that fails or hangs neither stops
nor slows the run: it is abandoned with one warning. Trackers are offline, and write into the run's
folder or its parent, unless a key or a server is set in the environment. The id of the run in the
tracker is saved in the folder, so that a resumed run continues it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only

from app.training.log_files import RunLogger, RunSummary, is_detail
from common.files import write_atomically
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
_STOP = None

Build = Callable[[Path, str, "str | None"], Any]
"""builds Lightning's logger from a folder, and the name and id of a run (None for a new one)"""


def _build_wandb(folder: Path, name: str, run_id: str | None) -> Any:
    """Build Lightning's W&B logger: offline unless WANDB_API_KEY or WANDB_MODE is set."""
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
    """Build Lightning's MLflow logger: writes into the folder unless MLFLOW_TRACKING_URI is set."""
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
            self._queue.put_nowait(_STOP)
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
            self._save_id(logger)
            while (call := self._queue.get()) is not _STOP and not self._is_abandoned:
                call(logger)
        except BaseException as error:  # noqa: BLE001  the run continues whatever a tracker raises
            self._abandon(str(error) or type(error).__name__)

    def _saved_id(self) -> str | None:
        run_id = _read_ids(self.folder).get(self.kind)
        return run_id if isinstance(run_id, str) else None

    def _save_id(self, logger: Any) -> None:
        _ = logger.experiment  # creates the run, which has no id before
        ids = _read_ids(self.folder) | {self.kind: str(logger.version)}
        write_atomically(self.folder / _IDS_FILE, json.dumps(ids) + "\n")

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
