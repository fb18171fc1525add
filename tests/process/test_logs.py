"""What is said goes into the run's log, and a message that cannot be written stops nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.table import Table

from app.process import logs
from app.process.logs import LOG_FILE, RunLog, open_run_log, record, show, start_logging


def test_a_malformed_message_of_a_library_stops_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handler, library = RunLog(), logging.Logger("library")
    library.addHandler(handler)
    library.warning("deprecated", FutureWarning)
    library.warning("still here")
    handler.write_into(tmp_path)
    assert "still here" in (tmp_path / LOG_FILE).read_text()
    assert "Logging error" in capsys.readouterr().err


@pytest.fixture
def own_loggers() -> Iterator[None]:
    """The handlers of a process, restored afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_what_is_printed_is_in_the_log_and_no_pipe_cuts_a_table(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    own_loggers: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start_logging()
    show("before the run has its folder")
    open_run_log(tmp_path)
    table = Table("data set", "verdict")
    table.add_row("a" * 150, "better")
    show(table)
    record("only in the log \x1b[31m")
    logging.getLogger("app").debug("a detail")
    printed, logged = capsys.readouterr().out, (tmp_path / LOG_FILE).read_text()
    assert "a" * 150 in printed and "better" in printed and "only" not in printed
    for text in ("before the run", "a" * 150, "better", "only in the log \\x1b", "a detail"):
        assert text in logged
    assert "a detail" not in printed
    monkeypatch.setattr(logs, "_is_verbose", True)
    start_logging()
    logging.getLogger("app").debug("a detail")
    assert "a detail" in capsys.readouterr().out
