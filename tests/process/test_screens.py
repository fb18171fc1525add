"""What verbs print fits into narrow terminals without a broken word, and is whole in the log."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.table import Table

from app.config import run_verb
from app.process import logs

WIDTH = 70
"""of a narrow terminal"""
CELLS = [
    ("measure", "base", "tuned", "verdict"),
    *(
        (f"val/loss/{name}", "0.123456", "0.123456 (+1,200.0 %)", "not distinguishable from chance")
        for name in ("lists", "orders")
    ),
]


def words(text: str) -> set[str]:
    """Return the words of a screen, without colors, lines of tables and colons of lists."""
    plain = re.sub(r"\x1b\[[\d;]*m|[\u2500-\u257f]", " ", text)
    return {word.rstrip(":") for word in plain.split()}


@pytest.mark.parametrize("texts", [("verdict",), ()], ids=["shrinks", "becomes a list"])
def test_no_table_breaks_a_word_or_is_cut(
    texts: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logs.show(logs.text_table(CELLS, "base vs tuned", texts))
    whole = capsys.readouterr().out
    assert "…" not in whole
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.setenv("FORCE_COLOR", "1")
    logs.show(logs.text_table(CELLS, "base vs tuned", texts))
    narrow = capsys.readouterr().out
    assert words(narrow) == words(whole)
    plain = re.sub(r"\x1b\[[\d;]*m", "", narrow)
    assert max(map(len, plain.splitlines())) <= WIDTH


def test_a_text_is_wrapped_by_words_in_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "one " * 30 + "\n  " + "indented-word " * 9
    assert logs.wrapped(text) == text
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    lines = logs.wrapped(text).splitlines()
    assert max(map(len, lines)) <= 60 and words(logs.wrapped(text)) == {"one", "indented-word"}
    assert lines[-1].startswith("    indented-word")


def test_a_malformed_message_of_a_library_stops_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handler, library = logs.RunLog(), logging.Logger("library")
    library.addHandler(handler)
    library.warning("deprecated", FutureWarning)
    library.warning("still here")
    handler.write_into(tmp_path)
    assert "still here" in (tmp_path / logs.LOG_FILE).read_text()
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
    logs.start_logging()
    logs.show("before the run has its folder")
    logs.open_run_log(tmp_path)
    table = Table("data set", "verdict")
    table.add_row("a" * 150, "better")
    logs.show(table)
    logs.record("only in the log \x1b[31m")
    logging.getLogger("app").debug("a detail")
    printed, logged = capsys.readouterr().out, (tmp_path / logs.LOG_FILE).read_text()
    assert "a" * 150 in printed and "better" in printed and "only" not in printed
    for text in ("before the run", "a" * 150, "better", "only in the log \\x1b", "a detail"):
        assert text in logged
    assert "a detail" not in printed
    monkeypatch.setattr(logs, "_is_verbose", False)  # as it is afterwards
    assert run_verb("plan", lambda config: logs.start_logging(), words=["--verbose"]) == 0
    logging.getLogger("app").debug("a detail")
    assert "a detail" in capsys.readouterr().out
