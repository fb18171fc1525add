"""A run shows by default what it learned: answers of base and tuned to a few held-out prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.evaluation import evaluator as evaluator_module
from tests.tiny import train_into


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("adapter", "count"), [("lora", 3), ("full", 1)])
def test_a_run_shows_answers_of_both_models(
    adapter: str, count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (f"adapter={adapter}", f"evaluation.show_answers={count}")
    folder = train_into(tmp_path / "run", *words, "evaluation.max_new_tokens=4")
    lines, printed = lines_of(folder), capsys.readouterr().out
    assert len({line["data_set"] for line in lines}) == min(count, 2)
    page, log = (folder / "report.html").read_text(), (folder / "train.log").read_text()
    for line in lines:
        assert line["metrics"] == {} and {"base", "tuned"} <= set(line)
    assert printed.count("  base: ") == printed.count("  tuned: ") == count
    assert log.count("  tuned: ") == count
    assert page.index("Predictions</h2>") < page.index("Base vs tuned</h2>")
    assert "exact_match" not in (folder / "metrics.json").read_text()


def test_no_answers_are_shown_if_they_are_turned_off(tmp_path: Path) -> None:
    folder = train_into(tmp_path / "run", "evaluation.show_answers=0")
    assert (folder / "metrics.json").exists() and not (folder / "predictions.jsonl").exists()


def test_a_model_that_cannot_answer_does_not_fail_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("this architecture does not generate")

    monkeypatch.setattr(evaluator_module, "answer_batches", fail)
    folder = train_into(tmp_path / "run", "evaluation.show_answers=3")
    assert (folder / "metrics.json").exists() and not (folder / "predictions.jsonl").exists()
    log = (folder / "train.log").read_text()
    assert "answers are not shown: this architecture does not generate" in log
    with pytest.raises(RuntimeError, match="does not generate"):
        train_into(tmp_path / "measured", "evaluation.exact_match=true")
