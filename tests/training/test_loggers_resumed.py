"""What the loggers of a resumed run keep of existing files, and what they drop."""

from __future__ import annotations

import csv
import errno
import functools
import logging
import os
from pathlib import Path

import pytest
from tensorboard.summary.writer import event_file_writer
from tensorboard.summary.writer.event_file_writer import AtomicCounter
from tensorboard.summary.writer.record_writer import RecordWriter

from app.training.checkpoint.disk import SaveError
from app.training.loggers import CsvLogger, TensorBoardLogger
from app.training.metrics import Metrics
from app.training.trainer import LoggerConfig, build_loggers
from common.errors import ENVIRONMENT_ERROR, UserError, exit_code


def rows_in(file: Path) -> list[tuple[str, str]]:
    with file.open(newline="") as stream:
        return [(row["step"], row["train/loss"]) for row in csv.DictReader(stream)]


def write_steps(logger: CsvLogger, *steps: int) -> None:
    for step in steps:
        logger.log_metrics({"train/loss": step / 2}, step=step)


@pytest.mark.parametrize("step", [0, 1, 9, 10, 11, 99, 100, 120])
def test_rows_up_to_the_step_stay(tmp_path: Path, step: int) -> None:
    written = [*range(13), 12, 100, 100, 101]
    logger = CsvLogger(tmp_path / "metrics.csv", ["a"])
    write_steps(logger, *written)
    logger.drop_rows_after(step)
    assert rows_in(logger.path) == [(str(n), str(n / 2)) for n in written if n <= step]


@pytest.mark.parametrize("num_bytes", range(1, 19))
def test_a_row_that_was_cut_off_goes(tmp_path: Path, num_bytes: int) -> None:
    logger = CsvLogger(tmp_path / "metrics.csv", ["a"])
    write_steps(logger, 1, 12)
    text = logger.path.read_bytes()
    logger.path.write_bytes(text[:-num_bytes])
    logger.drop_rows_after(15)
    logger.log_metrics({"train/loss": 6.0}, step=13)
    assert rows_in(logger.path) == [("1", "0.5"), ("13", "6.0")]


@pytest.mark.parametrize("num_bytes", [0, 10])
def test_a_file_of_half_a_header_begins_again(tmp_path: Path, num_bytes: int) -> None:
    logger = CsvLogger(tmp_path / "metrics.csv", ["a"])
    write_steps(logger, 1)
    logger.path.write_bytes(logger.path.read_bytes()[:num_bytes])
    logger.drop_rows_after(4)
    write_steps(logger, 5)
    assert rows_in(logger.path) == [("5", "2.5")]


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


def test_a_folder_that_tensorboard_cannot_make_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    logger = TensorBoardLogger(tmp_path / "tensorboard")
    for step in (1, 2):
        logger.log_metrics({"train/loss": 1.0}, step=step)
    logger.finalize("success")
    assert len(caplog.messages) == 1 and "could not be written" in caplog.text


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
