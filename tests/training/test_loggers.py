"""What loggers keep of a resumed run, what trackers receive, and that none stops a run."""

from __future__ import annotations

import csv
import errno
import functools
import json
import logging
import os
import re
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from tensorboard.summary.writer import event_file_writer
from tensorboard.summary.writer.event_file_writer import AtomicCounter
from tensorboard.summary.writer.record_writer import RecordWriter

from app.config import load_config
from app.training import loggers
from app.training.checkpoint.disk import SaveError
from app.training.loggers import CsvLogger, RunSummary, TensorBoardLogger, Tracker
from app.training.metrics import Metrics
from app.training.trainer import LoggerConfig, build_loggers
from common.errors import ENVIRONMENT_ERROR, UserError, exit_code
from tests.processes import LONGEST
from tests.tiny import small_run, train_into


def rows_in(file: Path) -> list[tuple[str, str]]:
    with file.open(newline="") as stream:
        return [(row["step"], row["train/loss"]) for row in csv.DictReader(stream)]


def write_steps(logger: CsvLogger, *steps: int) -> None:
    for step in steps:
        logger.log_metrics({"train/loss": step / 2}, step=step)


def test_rows_up_to_the_step_stay_and_what_was_cut_off_goes(tmp_path: Path) -> None:
    written = [*range(13), 12, 100, 100, 101]
    logger = CsvLogger(tmp_path / "metrics.csv", ["a"])
    write_steps(logger, *written)
    text = logger.path.read_bytes()
    for step in (0, 1, 9, 10, 11, 99, 100, 120):
        logger.path.write_bytes(text)
        logger.drop_rows_after(step)
        assert rows_in(logger.path) == [(str(n), str(n / 2)) for n in written if n <= step]
    header = text.index(b"\n") + 1
    for length in (0, 10, header, *range(text.index(b"\n12,"), text.index(b"\n12,") + 19)):
        logger.path.write_bytes(text[:length])
        logger.drop_rows_after(12)
        logger.log_metrics({"train/loss": 6.5}, step=13)
        whole = [str(n) for n in written[: text[header:length].count(b"\n")]]
        assert [step for step, _ in rows_in(logger.path)] == [*whole, "13"], length


def test_a_run_that_was_begun_with_fewer_columns(tmp_path: Path) -> None:
    """As a mixture's was before the load of its experts was written."""
    earlier = CsvLogger(tmp_path / "metrics.csv", ["a"])
    write_steps(earlier, 1, 2)
    logger = CsvLogger(tmp_path / "metrics.csv", ["a"])
    logger.drop_rows_after(1)
    logger.columns += ["experts/load_max/0"]
    for step in (2, 3):
        logger.log_metrics({"train/loss": step / 2, "experts/load_max/0": 1.5}, step=step)
    assert rows_in(logger.path) == [("1", "0.5"), ("2", "1.0"), ("3", "1.5")]
    with logger.path.open(newline="") as stream:
        assert [row["experts/load_max/0"] for row in csv.DictReader(stream)] == ["", "1.5", "1.5"]
    fewer = CsvLogger(tmp_path / "metrics.csv", ["a"])
    write_steps(fewer, 4)  # an older version again: its rows stay under the right names
    assert rows_in(logger.path)[-1] == ("4", "2.0")


def points_in(folder: Path) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("train/loss")]


@pytest.mark.parametrize(("last_step", "kept"), [(3, 3), (None, 0)])
def test_no_point_is_shown_twice(
    tmp_path: Path, last_step: int | None, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Files of one second are read in the order of their names, in which a tenth writer of one
    # process comes before its ninth; a run that resumes is another process, seconds later.
    monkeypatch.setattr(event_file_writer, "_global_uid", AtomicCounter(0))
    config = LoggerConfig(name="tensorboard")
    for logger in build_loggers(config, tmp_path, ["a"]):
        for step in range(1, 7):
            logger.log_metrics({"train/loss": float(step)}, step=step)
        logger.finalize("killed")
    assert points_in(tmp_path / "tensorboard") == [(step, float(step)) for step in range(1, 7)]
    before = (tmp_path / "metrics.csv").read_bytes()
    loggers = build_loggers(config, tmp_path, ["a"], last_step=last_step)
    assert (tmp_path / "metrics.csv").read_bytes() == before
    for logger in loggers:
        logger.drop_rows_after(last_step)
        for step in range(kept + 1, 9):
            logger.log_metrics({"train/loss": step + 0.5}, step=step)
        logger.finalize("success")
    expected = [(step, step + (0.0 if step <= kept else 0.5)) for step in range(1, 9)]
    assert points_in(tmp_path / "tensorboard") == expected
    assert rows_in(tmp_path / "metrics.csv") == [(str(n), str(loss)) for n, loss in expected]


def test_curves_of_other_data_sets_are_refused() -> None:
    state = Metrics(["a", "b"], [], 10).state_dict()
    with pytest.raises(
        UserError, match=r"were named a, b, now they are named a, c; restore the names"
    ):
        Metrics(["a", "c"], [], 10).load_state_dict(state)


def test_a_run_that_starts_anew_has_its_own_columns(tmp_path: Path) -> None:
    config = LoggerConfig(name="csv")
    for name in ("a", "renamed"):
        (logger,) = build_loggers(config, tmp_path, [name])
        logger.drop_rows_after(None)
        logger.log_metrics({"train/loss": 1.5, f"train/loss/{name}": 2.5}, step=1)
    with (tmp_path / "metrics.csv").open(newline="") as stream:
        (row,) = csv.DictReader(stream)
    assert (row["train/loss"], row["train/loss/renamed"]) == ("1.5", "2.5")


def fail(*args: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("fails", ["write", "flush"])
def test_a_disk_that_fails_ends_tensorboard_and_not_the_run(
    tmp_path: Path, fails: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = TensorBoardLogger(tmp_path / "tensorboard")
    logger.log_metrics({"train/loss": 1.0}, step=1)
    logger.save()
    monkeypatch.setattr(RecordWriter, fails, fail)
    with caplog.at_level(logging.WARNING):
        for step in range(2, 5):
            logger.log_metrics({"train/loss": 1.0}, step=step)
            logger.save()
        logger.finalize("success")
    (message,) = caplog.messages
    assert "tensorboard could not be written: No space left on device; logging continues" in message
    assert points_in(tmp_path / "tensorboard")[0] == (1, 1.0)


@pytest.mark.parametrize("fails", ["write", "fsync"])
def test_rows_that_do_not_fit_the_disk_are_reported(
    tmp_path: Path, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = CsvLogger(tmp_path / "metrics.csv", ["a"])
    write_steps(logger, 1)
    if fails == "write":
        full = functools.partial(Path("/dev/full").open, "a")
        monkeypatch.setattr("app.training.loggers.open_no_follow", lambda *_, **how: full(**how))
    else:
        monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(SaveError) as caught:
        write_steps(logger, 2)
        logger.save()
    message = str(caught.value)
    assert "metrics.csv could not be written: No space left on device; it needs " in message
    assert "iB are free; free disk space, then type resume=" in message
    assert exit_code(caught.value) == ENVIRONMENT_ERROR


class RecordingLogger:
    """Stand-in for Lightning's logger of a tracker."""

    def __init__(self, run_id: str | None, *, fails_at: int = -1, hangs_at: int = -1) -> None:
        self.version, self.experiment = run_id or "new", self
        self.rows: list[tuple[dict[str, float], int]] = []
        self.params: Any = None
        self.status = ""
        self.fails_at, self.hangs_at = fails_at, hangs_at
        self.released = threading.Event()

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        if len(self.rows) == self.fails_at:
            raise ConnectionError("the server is gone\nat line 3")
        if len(self.rows) == self.hangs_at:
            self.released.wait(60)
        self.rows.append((metrics, step))

    def log_hyperparams(self, params: Any) -> None:
        self.params = params

    def finalize(self, status: str) -> None:
        self.status = status


def build_tracker(folder: Path, **faults: int) -> tuple[Tracker, list[RecordingLogger]]:
    made: list[RecordingLogger] = []

    def build(folder: Path, name: str, run_id: str | None) -> RecordingLogger:
        made.append(RecordingLogger(run_id, **faults))
        return made[-1]

    return Tracker("recorder", folder, build), made


def test_a_tracker_receives_rows_settings_and_status_and_continues_its_run(tmp_path: Path) -> None:
    for expected in ("new", "new"):
        tracker, made = build_tracker(tmp_path)
        tracker.log_hyperparams({"seed": 1})
        for step in (1, 2):
            tracker.log_metrics({"train/loss": 1.0, "train/share/a": 0.5}, step)
        tracker.finish(RunSummary(metrics={"val/loss": 1.0}))
        (logger,) = made
        assert logger.version == expected
        assert logger.rows == [({"train/loss": 1.0}, 1), ({"train/loss": 1.0}, 2)]
        assert logger.params == {"seed": 1} and logger.status == "success"
        ids = json.loads((tmp_path / "trackers.json").read_text())
        assert ids == {"recorder": "new"}
        (tmp_path / "trackers.json").write_text(json.dumps({"recorder": "new"}))


def test_a_restarted_run_starts_a_new_tracker_run(tmp_path: Path) -> None:
    tracker, _ = build_tracker(tmp_path)
    (tmp_path / "trackers.json").write_text(json.dumps({"recorder": "dead"}))
    tracker.drop_rows_after(3)
    assert tracker._saved_id() == "dead"
    tracker.drop_rows_after(None)
    assert tracker._saved_id() is None


@pytest.mark.parametrize(
    ("faults", "queued", "warning"),
    [
        ({"fails_at": 3}, 10_000, "the server is gone; the run continues without it"),
        ({"hangs_at": 3}, 10_000, "it did not finish within 1 s"),
        ({"hangs_at": 3}, 20, "it is 20 rows behind"),
    ],
)
def test_a_tracker_that_fails_hangs_or_falls_behind_is_abandoned(
    faults: dict[str, int], queued: int, warning: str, tmp_path: Path,
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(loggers, "MAX_WAIT_SECONDS", 1.0 if "hangs_at" in faults else LONGEST)
    monkeypatch.setattr(loggers, "MAX_QUEUED", queued)
    tracker, made = build_tracker(tmp_path, **faults)
    started = time.monotonic()
    with caplog.at_level(logging.WARNING):
        for step in range(500):
            tracker.log_metrics({"train/loss": 1.0}, step)
        tracker.finish(RunSummary())
    assert time.monotonic() - started < 30  # waiting at each step would take 50 s
    (message,) = caplog.messages
    assert message.startswith(f"logger=recorder: {warning}") and "\n" not in message
    assert len(made[0].rows) == 3 or queued == 20
    made[0].released.set()


def test_several_loggers_are_a_list(tmp_path: Path) -> None:
    config = load_config("train", small_run("logger=[tensorboard, wandb,mlflow]"))
    assert (config.logger.name, config.logger.also) == ("tensorboard", ["wandb", "mlflow"])
    names = [logger.name for logger in build_loggers(config.logger, tmp_path, ["a"])]
    assert names == ["csv", "tensorboard", "wandb", "mlflow"]
    csv_only = build_loggers(LoggerConfig(name="csv"), tmp_path, ["a"])
    assert [logger.name for logger in csv_only] == ["csv"]


WORDS = "名前-1 имя-1 ονομα-1 -1 اسم e\u0301 é a_b a# a+ a: a%23 a_x23_ a_x _xx all a.b a- 😀"
NAMES = [*WORDS.split(), "a b", "x" * 250, "x" * 249 + "y", "名" * 120]


def test_names_of_data_sets_stay_different_in_mlflow() -> None:
    metrics = {f"{phase}/loss/{name}": 1.0 for phase in ("train", "val") for name in NAMES}
    metrics |= {"train/loss": 1.0, "val/loss": 1.0}
    names = loggers.mlflow_names(metrics)
    assert len(names) == len(metrics)
    assert all(
        re.fullmatch(r"[/\w.\- ]{1,250}", name) and len(name.encode()) < 255 for name in names
    )
    assert {"val/loss/all", "val/loss/名前-1", "val/loss/имя-1", "val/loss/a b"} < set(names)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mlflow") is None, reason="needs mlflow-skinny")
def test_mlflow_records_a_run_and_its_resumption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = train_into(tmp_path / "run", "logger=mlflow")
    train_into(
        run, "logger=mlflow", f"resume={run}", "trainer.max_steps=6", "resume_allow=[epochs]"
    )
    run_id = json.loads((run / "trackers.json").read_text())["mlflow"]
    (kept,) = (run / "mlruns").glob(f"*/{run_id}")
    losses = (kept / "metrics/train/loss/all").read_text().splitlines()
    assert [int(line.split()[2]) for line in losses] == [1, 2, 3, 4, 5, 6]
    assert (kept / "metrics/final/val/loss/all").is_file()
    assert (kept / "artifacts/report.html").is_file()
    assert "status: 3" in (kept / "meta.yaml").read_text()  # finished
    assert yaml.safe_load((kept / "params/seed").read_text()) == 42


@pytest.mark.slow
@pytest.mark.skipif(find_spec("wandb") is None, reason="needs wandb")
def test_wandb_records_a_run_and_its_resumption_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(loggers, "MAX_WAIT_SECONDS", 120.0)  # it may take long to start
    run = train_into(tmp_path / "run", "logger=[wandb,csv]")
    train_into(run, "logger=wandb", f"resume={run}", "trainer.max_steps=6", "resume_allow=[epochs]")
    run_id = json.loads((run / "trackers.json").read_text())["wandb"]
    kept = sorted((tmp_path / "wandb").glob(f"offline-run-*-{run_id}"))
    assert len(kept) == 2
    for folder in kept:
        assert (folder / "files/report.html").is_file()
        assert b"train/loss" in (folder / f"run-{run_id}.wandb").read_bytes()
