"""Lines of predictions.jsonl, and the samples printed from them."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, cast

import pytest

from app.evaluation import evaluator as evaluator_module
from app.evaluation.comparison import print_samples
from app.evaluation.evaluator import Evaluator, Predictions, ShownBatches
from app.evaluation.generation import Answer, EvaluationConfig
from common.errors import Origin
from data_modules import Prompt

PROMPTS = {
    "sums": [
        Prompt([1, 2], "4", Origin("sums.jsonl", 1)),
        Prompt([3], "\u00e4 \u2028", Origin("sums.jsonl", 7)),
    ],
    "empty": [],
}
ANSWERS = {
    "base": [Answer("5", True), Answer("\u00e4", False)],
    "tuned": [Answer(" 4\n", True), Answer("\u00e4 ", True)],
}
TOKENIZER: Any = SimpleNamespace(decode=lambda ids: " ".join(map(str, ids)))


def answer(monkeypatch: pytest.MonkeyPatch, *variants: str) -> Predictions:
    monkeypatch.setattr(
        evaluator_module,
        "answer_batches",
        lambda model, *_, **__: iter([list(enumerate(ANSWERS[model]))]),
    )
    config = EvaluationConfig(exact_match=True, metrics=["numeric"])
    predictions = Predictions(TOKENIZER, PROMPTS, {2}, config)
    for name in variants:
        model: Any = name
        predictions.answer(name, model)
    return predictions


def test_predictions_have_one_line_per_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(answer(monkeypatch).prediction_lines()) == []  # before any answer
    first, second = answer(monkeypatch, "base", "tuned").prediction_lines()
    assert first == {
        "data_set": "sums",
        "source": "sums.jsonl:1",
        "prompt": "1 2",
        "reference": "4",
        "base": "5",
        "tuned": " 4\n",
        "finished": {"base": True, "tuned": True},
        "metrics": {name: {"base": 0.0, "tuned": 1.0} for name in ("exact_match", "numeric")},
    }
    assert (second["source"], second["base"], second["tuned"]) == ("sums.jsonl:7", "ä", "ä ")
    assert second["finished"] == {"base": False, "tuned": True}
    assert second["metrics"]["exact_match"] == {"base": 0.0, "tuned": 1.0}


def test_empty_answers_cause_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(ANSWERS, "silent", [Answer("", True), Answer(" \n", False)])
    answer(monkeypatch, "silent")
    assert "sums: 2 of 2 answers of silent are empty" in caplog.text


def test_progress_of_losses_counts_rows_instead_of_packs() -> None:
    shown: list[tuple[str, int, int]] = []
    batches = ShownBatches(["a", "b", "c"], "base-losses", 150, lambda *what: shown.append(what))
    assert list(batches) == ["a", "b", "c"]
    assert [done for _, done, _ in shown] == [0, 50, 100, 150]
    assert {(key, total) for key, _, total in shown} == {("base-losses", 150)}


def test_samples_are_taken_from_the_data_sets_in_turn(capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[dict[str, object]] = [
        {"data_set": name, "source": f"{name}.json:{row}", "prompt": "?", "base": "x"}
        for name, rows in (("lists", 5), ("orders", 2), ("people", 1))
        for row in range(rows)
    ]

    def shown(of: list[dict[str, object]], count: int) -> list[str]:
        print_samples(cast(Evaluator, SimpleNamespace(prediction_lines=lambda: iter(of))), count)
        return re.findall(r"\((.*)\.json", capsys.readouterr().out)

    assert shown(lines, 3) == ["lists", "orders", "people"]
    assert shown(lines, 7) == ["lists", "orders", "people", "lists", "orders", "lists", "lists"]
    assert shown(lines[:5], 3) == ["lists"] * 3 and shown([], 3) == []
