"""The table of base vs tuned, and the names of its metrics."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from app.evaluation.significance import Change, comparison_rows, report_comparison

METRICS = {
    "base/val/loss/lists": 7.01,
    "tuned/val/loss/lists": 0.25,
    "base/exact_match/lists": 0.015,
    "tuned/exact_match/lists": 0.96,
    "tuned/val/loss/people": 1.5,
}


def rows_of(metrics: dict[str, float], *changes: Change) -> list[list[str]]:
    return [row for _, row in comparison_rows(metrics, changes)]


def test_the_table_shows_base_next_to_tuned_and_a_dash_for_a_missing_value() -> None:
    assert rows_of(METRICS) == [
        ["lists", "loss", "7.0100", "0.2500", "-6.7600", "-", "-"],
        ["lists", "exact match", "1.5 %", "96.0 %", "+94.5 %", "-", "-"],
        ["people", "loss", "-", "1.5000", "-", "-", "-"],
    ]
    accuracy = {"": 0.8, "_low": 0.6269, "_high": 0.9049}
    metrics = {f"tuned/val/accuracy{end}/pairs": value for end, value in accuracy.items()}
    assert rows_of(metrics)[0][:5] == ["pairs", "accuracy", "-", "80.0 % (62.7 % to 90.5 %)", "-"]


def test_what_is_compared_row_by_row_has_its_interval_and_verdict() -> None:
    """Also without metrics of its own: a judge's grades of all questions are those of its mean."""
    loss = Change(measure="val/loss", name="lists", base=7.0, tuned=0.5, low=-7.0, high=-6.0,
                  num_rows=50, num_changed=50)  # fmt: skip
    grades = replace(loss, measure="judge", name="mt_bench", low=-6.9)
    first, *_, last = rows_of(METRICS, loss, grades)
    assert first[2:] == ["7.0100", "0.2500", "-6.5000", "-7.0000 to -6.0000", "better"]
    assert last == ["mt_bench", "judge's score", "7.00", "0.50", "-6.50", "-6.90 to -6.00", "worse"]


def test_what_is_printed_and_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report_comparison({"speed/tokens_per_second": 1.0}, [], [], tmp_path)
    assert "not compared: no rows were held out" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    points = {"base/points/old[new]": 0.7, "tuned/points/old[new]": 0.4}
    task = Change(measure="points", name="old[new]", base=0.7, tuned=0.4, low=-0.4, high=-0.2,
                  num_rows=100, num_changed=100, is_trained=False)  # fmt: skip
    hidden = {"tuned/val/f1_a/x": 0.5, "tuned/judge/math": 7.0}
    report_comparison(
        METRICS | points | hidden, [task], [replace(task, name="old/group")], tmp_path
    )
    printed = capsys.readouterr().out
    assert "base vs tuned: simultaneous 95 % intervals" in printed
    assert "old[new]" in printed, "rich would read it as a style"
    assert "val/f1_a" not in printed and "math" not in printed, "the page has them"
    assert "groups of tasks: 1 of 1 differ" in printed
    assert "verdict: forgot old[new] (points), not trained on" in printed
    content = json.loads((tmp_path / "verdict.json").read_text())
    assert content["table"][-1] == [
        "old/group", "points", "0.7000", "0.4000", "-0.3000", "-0.4000 to -0.2000", "forgotten"
    ]  # fmt: skip
    assert [row["name"] for row in content["changes"]] == ["old[new]"]
    assert ["all", "val/f1_a/x", "-", "0.5000", "-", "-", "-"] in content["table"]
