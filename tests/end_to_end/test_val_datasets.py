"""A validation file of one's own, from the curves of a run to its evaluation and its resumption."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def run_command(*words: str, verb: str = "train") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"app.{verb}", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_run_with_a_validation_file(tmp_path: Path) -> None:
    rows = [{"instruction": f"q {i}", "output": str(2 * i)} for i in range(60)]
    train, val = tmp_path / "train.json", tmp_path / "mine.json"
    train.write_text(json.dumps(rows[:40]))
    val.write_text(json.dumps(rows[37:]))
    run = tmp_path / "run"
    words = [
        "+experiment=quickstart",
        f"data.datasets={train}",
        f"data.val_datasets={val}",
        "data.test_datasets=[]",
        "trainer.early_stopping_patience=2",
        f"output.dir={run}",
    ]
    trained = run_command(*words, "trainer.max_steps=4")
    assert trained.returncode == 0, trained.stderr
    assert "3 of 23 validation documents are also in the training data" in (
        trained.stdout + trained.stderr
    )
    with (run / "metrics.csv").open() as file:
        curve = [float(row["val/loss/mine"]) for row in csv.DictReader(file) if row["val/loss"]]
    assert curve[-1] < curve[0]
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["tuned/val/loss/mine"] < metrics["base/val/loss/mine"]
    evaluated = run_command(f"run={run}", f"output.dir={tmp_path / 'e'}", verb="evaluate")
    assert evaluated.returncode == 0, evaluated.stderr
    val.write_text(json.dumps(rows[36:]))
    longer = ("trainer.max_steps=6", "resume=auto", "resume_allow=[epochs]")
    changed = run_command(*words, *longer)
    assert changed.returncode == 2
    assert "data.val_datasets[0] mine" in changed.stderr
