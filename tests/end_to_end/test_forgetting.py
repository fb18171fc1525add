"""Forgetting beyond noise is reported, and fails a regression check with exit code 4."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from common.errors import TrainingFault
from tests.in_process import run_into
from tests.runs import metrics_of
from tests.tiny import SAMPLES, TINY_BASE, train_into
from tools.tiny_base.corpus import read_corpus
from tools.tiny_base.write import write_json_lines

pytestmark = pytest.mark.slow

LISTS = f"{{path: {SAMPLES / 'lists_test.json'}, name: lists}}"


def test_forgetting_is_reported_and_ends_with_exit_code_4(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = f"model.path={TINY_BASE}"  # the truncated base of other tests has little to forget
    how = ("optimizer.lr=1e-2", "trainer.max_steps=8", "data.val_set_size=12")
    run = train_into(tmp_path / "run", base, f"data.datasets=[{LISTS}]", *how)
    assert "verdict: better on lists (loss)\n" in capsys.readouterr().out
    pretrained = tmp_path / "text.jsonl"  # rows that the base was trained on
    write_json_lines(pretrained, itertools.islice(read_corpus("list_corpus"), 60))
    text = f"{{path: {pretrained}, name: text, format: completion}}"
    words = [f"run={run}", f"data.datasets=[{LISTS}, {text}]", "data.val_set_size=12"]
    with pytest.raises(TrainingFault, match=r"text: loss .* worse by at least"):
        run_into("evaluate", tmp_path / "gate", *words, "evaluation.max_regression=0.1")
    printed = capsys.readouterr().out
    assert "verdict: better on lists (loss); forgot text (loss), not trained on\n" in printed
    metrics = metrics_of(tmp_path / "gate")
    assert metrics["change/val/loss/text/low"] > 0.1
    assert metrics["change/val/loss/lists/high"] < 0
