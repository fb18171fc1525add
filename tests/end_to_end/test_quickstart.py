"""The quickstart learns three tasks, as it prints in a terminal and through a pipe."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from app.process.logs import LOG_FILE
from common.text import percent
from tests.conftest import SCREEN
from tests.reliability.shell import Shell
from tests.runs import metrics_of
from tests.terminal import CTRL_C, type_in_terminal

pytestmark = pytest.mark.slow

TASKS = ("lists", "orders", "people")
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


def test_the_quickstart_learns_all_three_tasks(default_run: Path) -> None:
    """Exact match improves from under 10 % to over 80 % on each; printed through a pipe."""
    folder, screen = default_run, (default_run.parent / SCREEN).read_text()
    metrics = metrics_of(folder)
    for task in TASKS:
        assert metrics[f"base/exact_match/{task}"] < 0.10
        assert metrics[f"tuned/exact_match/{task}"] > 0.80
        assert metrics[f"val/loss/{task}"] < metrics[f"base/val/loss/{task}"]
        assert percent(metrics[f"tuned/exact_match/{task}"]) in screen
    lines, log = screen.splitlines(), (folder / LOG_FILE).read_text()
    before = lines_before_the_first_step(lines)
    assert before[0] == "loading libraries ..." and len(before) <= MOST_LINES
    assert "\x1b" not in screen and sum(line.startswith("step ") for line in lines) > 2
    check_end(lines, folder)
    assert " WARNING " not in log and "warning" not in screen + log


def test_evaluate_repeats_the_closing_table(
    default_run: Path, shell: Shell, tmp_path: Path
) -> None:
    """Losses are measured on all rows, answers on a quarter of them."""
    folder = tmp_path / "evaluation"
    words = (f"run={default_run}", "evaluation.max_rows=10")
    screen = shell.train_into(folder, *words, module="app.evaluate")
    assert screen.splitlines()[-1] == f"run: {folder}"
    again, at_training = map(metrics_of, (folder, default_run))
    answered = {f"{who}/exact_match/{task}" for who in ("base", "tuned") for task in TASKS}
    assert answered <= set(again)
    # Intervals refer to the answered rows, here a quarter.
    other = {name for name in again if name.startswith("change/exact_match/")}
    for name in set(again) - answered - other:
        assert again[name] == pytest.approx(at_training[name], rel=1e-6), name
    answers, at_the_end = (
        [json.loads(line) for line in (run / "predictions.jsonl").read_text().splitlines()]
        for run in (folder, default_run)
    )
    assert len(answers) == 10 * len(TASKS) and all(answer in at_the_end for answer in answers)


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
