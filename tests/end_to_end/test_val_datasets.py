"""A validation file of one's own, from the curves of a run to its evaluation and its resumption."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import read_column
from tests.reliability.shell import Shell
from tests.runs import metrics_of

pytestmark = pytest.mark.slow


def test_a_run_with_a_validation_file(shell: Shell, tmp_path: Path) -> None:
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
    ]
    printed = shell.train_into(run, *words, "trainer.max_steps=4")
    assert "3 of 23 validation documents are also in the training data" in printed
    first, *_, last = read_column(run, "val/loss/mine").values()
    assert last < first
    metrics = metrics_of(run)
    assert metrics["tuned/val/loss/mine"] < metrics["base/val/loss/mine"]
    shell.train_into(tmp_path / "evaluated", f"run={run}", module="app.evaluate")
    val.write_text(json.dumps(rows[36:]))
    longer = ("trainer.max_steps=6", "resume=auto", "resume_allow=[epochs]")
    printed = shell.train_into(run, *words, *longer, code=2)
    assert "data.val_datasets[0] mine" in printed
