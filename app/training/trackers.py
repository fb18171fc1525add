"""Experiment trackers: Lightning's own loggers for W&B and MLflow, kept away from the run.

Each works in a thread of its own behind a queue, so that one that fails or hangs neither stops nor
slows a run: it is left behind with one warning. Offline, in or beside the run's folder, unless a
key or a server is set in the environment. The id of its run is kept in the folder: a resumed run
goes on in it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from app.process.files import write_whole
from app.training.log_files import Outcome, is_detail
from data_modules import printable, redact

log = logging.getLogger(__name__)

IDS_FILE = "trackers.json"
PROJECT = "loft"
MAX_WAITING = 10_000
"""rows that wait for a tracker, after which it is left behind"""
LAST_SECONDS, SECONDS_OF_STOPPED = 20.0, 1.0
"""that a run waits for a tracker at its end: one that is done, and one that was stopped"""
STOP = None

Build = Callable[[Path, str, "str | None"], Any]
"""folder, name and id of the tracker's run, None for a new one -> Lightning's logger"""


def build_wandb(folder: Path, name: str, run_id: str | None) -> Any:
    """Build Lightning's W&B logger: offline unless WANDB_API_KEY or WANDB_MODE is set."""
    from lightning.pytorch.loggers import WandbLogger

    offline = not (os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE"))
    project = os.environ.get("WANDB_PROJECT", PROJECT)
    given = run_id or secrets.token_hex(4)
    os.environ.setdefault("WANDB_SILENT", "true")
    os.environ.setdefault("WANDB_CONSOLE", "off")  # it would put itself between us and the screen
    # Beside the run's folder: W&B makes links, and a run's folder with links in it is refused.
    place = os.environ.get("WANDB_DIR", str(folder.parent))
    return WandbLogger(name=name, save_dir=place, id=given, project=project, offline=offline)


def build_mlflow(folder: Path, name: str, run_id: str | None) -> Any:
    """Build Lightning's MLflow logger: into the folder unless MLFLOW_TRACKING_URI is set."""
    from lightning.pytorch.loggers import MLFlowLogger

    # MLflow 3 keeps its file store behind this switch; a database would need one more package.
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    # We report a server that is gone once; MLflow would at each retry.
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
    return MLFlowLogger(
        experiment_name=os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT),
        run_name=name,
        run_id=run_id,
        tracking_uri=os.environ.get("MLFLOW_TRACKING_URI"),
        save_dir=str(folder / "mlruns"),
    )


BUILDERS: dict[str, Build] = {"wandb": build_wandb, "mlflow": build_mlflow}


class Tracker(Logger):
    """Hand rows, settings and files to a tracker in a thread of its own."""

    def __init__(
        self, kind: str, folder: Path, build: Build | None = None, *, details: bool = False
    ) -> None:
        super().__init__()
        self.kind, self.folder, self.details = kind, folder, details
        self._build = build or BUILDERS[kind]
        self._queue: queue.Queue[Callable[[Any], None] | None] = queue.Queue(MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._is_left = False

    @property
    def name(self) -> str:
        """Name of this logger."""
        return self.kind

    @property
    def version(self) -> str:
        """Empty: the tracker gives its run an id of its own."""
        return ""

    @rank_zero_only
    def forget(self) -> None:
        """Begin a new run in the tracker: the training in this folder starts anew."""
        (self.folder / IDS_FILE).unlink(missing_ok=True)

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Hand over a row."""
        row = metrics if self.details else {n: v for n, v in metrics.items() if not is_detail(n)}
        row = _apart(row) if self.kind == "mlflow" else dict(row)
        self._hand(lambda logger: logger.log_metrics(row, step))

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Hand over the settings; MLflow takes those of a run once."""
        if self.kind == "mlflow" and self._known_id() is not None:
            return
        self._hand(lambda logger: logger.log_hyperparams(params))

    @rank_zero_only
    def finish(self, outcome: Outcome) -> None:
        """Hand over the final figures and files, and end; waits at most `LAST_SECONDS`."""
        if self._thread is None:
            return
        attach = {"wandb": _attach_to_wandb, "mlflow": _attach_to_mlflow}.get(self.kind)
        if attach is not None:
            self._hand(lambda logger: attach(logger, outcome.metrics, outcome.files))
        status = "success" if outcome.is_done else "failed"
        self._hand(lambda logger: logger.finalize(status))
        if self.kind == "wandb":
            self._hand(lambda logger: logger.experiment.finish(int(not outcome.is_done)))
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(STOP)
        seconds = LAST_SECONDS if outcome.is_done else SECONDS_OF_STOPPED
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._leave(f"it did not end within {seconds:g} s")

    def _hand(self, work: Callable[[Any], None]) -> None:
        if self._is_left:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self.kind, daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(work)
        except queue.Full:
            self._leave(f"{MAX_WAITING:,} rows wait for it")

    def _work(self) -> None:
        try:
            logger = self._build(self.folder, run_name(self.folder), self._known_id())
            self._keep_id(logger)
            while (work := self._queue.get()) is not STOP and not self._is_left:
                work(logger)
        except BaseException as error:  # noqa: BLE001  a tracker's, of any kind: the run goes on
            self._leave(str(error) or type(error).__name__)

    def _known_id(self) -> str | None:
        known = _read_ids(self.folder).get(self.kind)
        return known if isinstance(known, str) else None

    def _keep_id(self, logger: Any) -> None:
        _ = logger.experiment  # made here: only then the run has an id
        ids = _read_ids(self.folder) | {self.kind: str(logger.version)}
        write_whole(self.folder / IDS_FILE, json.dumps(ids) + "\n")

    def _leave(self, why: str) -> None:
        if not self._is_left:
            self._is_left = True
            first = next(iter(why.splitlines()), "")
            log.warning(
                "logger=%s: %s; the run goes on without it, metrics.csv has every row",
                self.kind,
                printable(redact(first)),
            )


def run_name(folder: Path) -> str:
    """Return what a tracker calls a run: the last two parts of its folder."""
    return "/".join(folder.absolute().parts[-2:])


def _read_ids(folder: Path) -> dict[str, Any]:
    try:
        ids = json.loads((folder / IDS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return ids if isinstance(ids, dict) else {}


def _apart(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return figures whose names MLflow's files can have: none is the beginning of another's.

    It makes folders of the names: `val/loss` beside `val/loss/a` becomes `val/loss/all`.
    """
    return {
        f"{name}/all"
        if name.endswith("/loss") or any(one.startswith(f"{name}/") for one in metrics)
        else name: value
        for name, value in metrics.items()
    }


def _attach_to_wandb(logger: Any, metrics: Mapping[str, float], files: Sequence[Path]) -> None:
    logger.experiment.summary.update(dict(metrics))
    for file in files:
        logger.experiment.save(str(file), base_path=str(file.parent), policy="now")


def _attach_to_mlflow(logger: Any, metrics: Mapping[str, float], files: Sequence[Path]) -> None:
    final = {name: value for name, value in metrics.items() if not is_detail(name)}
    logger.log_metrics({f"final/{name}": value for name, value in _apart(final).items()})
    for file in files:
        logger.experiment.log_artifact(logger.run_id, str(file))
