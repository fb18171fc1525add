"""The quickstart improves exact match from under 10 % to over 80 % on each of three tasks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.text import percent
from tests.conftest import SCREEN
from tests.reliability.shell import Shell

TASKS = ("lists", "orders", "people")


@pytest.mark.slow
def test_the_quickstart_learns_all_three_tasks(default_run: Path) -> None:
    folder, screen = default_run, (default_run.parent / SCREEN).read_text()
    metrics = json.loads((folder / "metrics.json").read_text())
    for task in TASKS:
        assert metrics[f"base/exact_match/{task}"] < 0.10
        assert metrics[f"tuned/exact_match/{task}"] > 0.80
        assert metrics[f"val/loss/{task}"] < metrics[f"base/val/loss/{task}"]
        assert percent(metrics[f"tuned/exact_match/{task}"]) in screen
    assert screen.splitlines()[-1] == f"run: {folder}"
    assert f"python -m app.evaluate run={folder}" in screen


@pytest.mark.slow
def test_evaluate_repeats_the_closing_table(
    default_run: Path, shell: Shell, tmp_path: Path
) -> None:
    """Losses are measured on all rows, answers on a quarter of them."""
    folder = tmp_path / "evaluation"
    words = (f"run={default_run}", "evaluation.max_rows=10")
    screen = shell.train_into(folder, *words, module="app.evaluate")
    assert screen.splitlines()[-1] == f"run: {folder}"
    again, at_training = (
        json.loads((run / "metrics.json").read_text()) for run in (folder, default_run)
    )
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
