"""What verbs print fits into narrow terminals without a broken word, and is whole in the log."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table
from rich.text import Text

from app.config import run_verb
from app.doctor.__main__ import Findings, print_findings
from app.doctor.rows import PROBLEM, Row
from app.evaluation.significance import Change, report_comparison
from app.process import logs
from app.process.logs import LOG_FILE, RunLog, open_run_log, record, show, start_logging, wrapped
from app.sweep.parameters import parse_parameters
from app.sweep.trials import Trial, print_results
from common.text import duration
from tests.conftest import ROOT
from tests.terminal import type_in_terminal

WIDTHS = (60, 80, 100)
NAMES = ("customer_support_conversations", "orders")
METRICS = {
    f"{who}/{measure}/{name}": 0.123456
    for who in ("base", "tuned")
    for measure in ("val/loss", "val/perplexity", "exact_match", "rougeL", "accuracy", "passed")
    for name in NAMES
}
CHANGES = [
    Change(measure=measure, name=name, base=0.0, tuned=1.0, low=-1.0, high=1.0, num_rows=1200,
           num_changed=1200)
    for measure in ("val/loss", "exact_match")
    for name in NAMES
]  # fmt: skip
TRIALS = [
    Trial(number=number, overrides=[f"optimizer.lr=1e-{number}", "adapter.r=16", "seed=1"],
          folder="s", exit_code=4, seconds=90.0, objective=0.5, error="the loss is nan " * 9)
    for number in range(1, 4)
]  # fmt: skip
FOUND = [
    Row(what="flash attention", found="not installed, so that sdpa is taken " * 3, status=PROBLEM,
        fix="pip install flash-attn --no-build-isolation")
]  # fmt: skip
SCREENS: dict[str, Callable[[], None]] = {
    "base vs tuned": lambda: report_comparison(METRICS, CHANGES, [], Path()),
    "sweep": lambda: print_results(
        TRIALS, parse_parameters(["optimizer.lr=1e-1,1e-2,1e-3", "adapter.r=16,8", "seed=1"]), {}
    ),
    "doctor": lambda: print_findings(Findings(rows=tuple(FOUND), machines=())),
}


def words(text: str) -> set[str]:
    """Return the words of a screen, without colors, lines of tables and colons of lists."""
    plain = re.sub(r"\x1b\[[\d;]*m|[\u2500-\u257f]", " ", text)
    return {word.rstrip(":") for word in plain.split()}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", SCREENS)
def test_no_table_breaks_a_word_or_is_cut(
    name: str,
    width: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    SCREENS[name]()
    whole = capsys.readouterr().out
    assert "…" not in whole
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("FORCE_COLOR", "1")
    SCREENS[name]()
    narrow = capsys.readouterr().out
    assert words(narrow) == words(whole)
    plain = re.sub(r"\x1b\[[\d;]*m", "", narrow)
    assert max(map(len, plain.splitlines())) <= width


def test_all_tables_are_printed_by_one_function() -> None:
    others = [
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for file in sorted((ROOT / "app").rglob("*.py"))
        if file.name != "logs.py" or file.parent.name != "process"
        for line in file.read_text("utf-8").splitlines()
        if re.search(r"\.print\(\w*_?table\b", line)
    ]
    assert others == []


def test_a_column_shrinks_to_its_longest_word(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("FORCE_COLOR", "1")
    table = Table("name", "text", box=None, pad_edge=False)
    table.add_row(Text("incomprehensibilities"), "one two three four")
    show(table)
    assert len(capsys.readouterr().out.splitlines()) == 4
    wide = Table("name", "text", box=None, pad_edge=False)
    wide.add_row("incomprehensibilities", "incomprehensibilities")
    show(wide)
    lists = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
    assert lists == ["name: incomprehensibilities", "  text: incomprehensibilities"]


def test_a_text_is_wrapped_by_words_in_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "one " * 30 + "\n  " + "indented-word " * 9
    assert wrapped(text) == text
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    lines = wrapped(text).splitlines()
    assert max(map(len, lines)) <= 60 and words(wrapped(text)) == {"one", "indented-word"}
    assert lines[-1].startswith("    indented-word")


@pytest.mark.parametrize(
    ("seconds", "text"), [(9.51, "9.5 s"), (46, "46 s"), (384, "6.4 min"), (9000, "2.5 h")]
)
def test_a_time_has_one_form(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.slow
def test_a_plan_breaks_no_word_in_a_terminal(tmp_path: Any) -> None:
    typed = ("+experiment=llama8b", "hardware=1xh100")
    screen = type_in_terminal(
        sys.executable, WIDTHS[0], "app.plan", *typed, f"output.dir={tmp_path}/a"
    )
    assert screen.code == 0
    prose = "\n".join(screen.lines).partition("fastest settings that fit")[0]
    wide = type_in_terminal(sys.executable, 1000, "app.plan", *typed, f"output.dir={tmp_path}/b")
    assert words(prose) <= words("\n".join(wide.lines))


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
    monkeypatch.setattr(logs, "_is_verbose", False)  # as it is afterwards
    assert run_verb("plan", lambda config: start_logging(), words=["--verbose"]) == 0
    logging.getLogger("app").debug("a detail")
    assert "a detail" in capsys.readouterr().out
