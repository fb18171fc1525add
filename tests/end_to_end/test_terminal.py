"""Output of the first run, in a terminal and through a pipe."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from app.process.logs import LOG_FILE
from tests.conftest import SCREEN
from tests.reliability.shell import Shell
from tests.terminal import CTRL_C, type_in_terminal

MOST_LINES = 14
"""limit of the lines before the first step"""
PROGRESS = re.compile(r"(train|validate|done|stopped|step) .*\d+/\d+ ")


def lines_before_the_first_step(lines: list[str]) -> list[str]:
    first = next(
        i for i, line in enumerate(lines) if re.match(r"(train|validate|done|step) ", line)
    )
    return [line for line in lines[:first] if line]


def check_end(lines: list[str], folder: Path) -> None:
    end = "".join(lines[lines.index("next:") :])  # a narrow terminal wraps the paths
    assert re.findall(r" -m ([\w.]+)", end) == ["app.evaluate", "app.chat", "tensorboard.main"]
    assert end.endswith(f"run: {folder}")
    assert any("base vs tuned" in line for line in lines)


@pytest.mark.slow
def test_the_first_run_in_a_terminal(shell: Shell, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ["+experiment=quickstart", "trainer.max_steps=8", f"output.dir={folder}"]
    words += ["evaluation.max_rows=4", "evaluation.max_new_tokens=4"]
    screen = type_in_terminal(shell.python, 80, "app.train", *words)
    assert screen.code == 0, screen.lines
    assert screen.lines[0] == "loading libraries ..."
    before = lines_before_the_first_step(screen.lines)
    assert len(before) <= MOST_LINES, before
    (bar,) = (line for line in screen.lines if PROGRESS.match(line))
    assert re.match(r"done ━+ 8/8 loss [\d.]+  val [\d.]+  [\d,]+ tok/s", bar)
    assert len(bar) <= 80
    check_end(screen.lines, folder)
    details = (folder / LOG_FILE).read_text()
    assert "parameter groups of AdamW" in details and "chat template:" in details


@pytest.mark.slow
def test_the_quickstart_through_a_pipe(default_run: Path) -> None:
    output, log = (default_run.parent / SCREEN).read_text(), (default_run / LOG_FILE).read_text()
    lines = output.splitlines()
    before = lines_before_the_first_step(lines)
    assert before[0] == "loading libraries ..." and len(before) <= MOST_LINES
    assert "\x1b" not in output and sum(line.startswith("step ") for line in lines) > 2
    check_end(lines, default_run)
    assert " WARNING " not in log and "warning" not in output + log


@pytest.mark.slow
def test_the_bar_shows_stopped_after_ctrl_c(shell: Shell, tmp_path: Path) -> None:
    words = ["+experiment=quickstart", "logger=csv", f"output.dir={tmp_path / 'run'}"]
    # The bar is drawn ten times a second: on a fast machine not at every step.
    screen = type_in_terminal(
        shell.python, 80, "app.train", *words, press=CTRL_C, after=r" [1-9]\d*/300 "
    )
    assert screen.code == 130
    (bar,) = (line for line in screen.lines if PROGRESS.match(line))
    assert bar.startswith("stopped ") and "/300 " in bar
    end = [line for line in screen.lines[screen.lines.index(bar) + 1 :] if line]
    assert end[0].startswith("stopped by SIGINT: step ") and end[1].startswith("to resume: ")
