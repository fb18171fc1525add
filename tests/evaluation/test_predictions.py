"""Lines of predictions.jsonl, and what a run shows of both models."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from app.evaluation import evaluator as evaluator_module
from app.evaluation.evaluator import Evaluator, Predictions
from app.evaluation.generation import Answer, EvaluationConfig
from common.errors import Origin
from data_modules import Prompt
from tests.tiny import train_into


def test_predictions_have_one_line_per_prompt(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    origins = [Origin("sums.jsonl", line) for line in (1, 7)]
    prompts = {"sums": [Prompt([1, 2], "4", origins[0]), Prompt([3], "ä \u2028", origins[1])]}
    answers = {
        "base": [Answer("5", True), Answer("ä", False)],
        "tuned": [Answer(" 4\n", True), Answer("ä ", True)],
    }
    monkeypatch.setattr(
        evaluator_module,
        "answer_batches",
        lambda model, *_, **__: iter([list(enumerate(answers[model]))]),
    )
    tokenizer: Any = SimpleNamespace(decode=lambda ids: " ".join(map(str, ids)))
    config = EvaluationConfig(exact_match=True, metrics=["numeric"])
    predictions = Predictions(tokenizer, prompts | {"empty": []}, {2}, config)
    assert list(predictions.prediction_lines()) == []  # before any answer
    for name in answers:
        predictions.answer(name, cast(Any, name))
    first, second = predictions.prediction_lines()
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
    assert second["source"] == "sums.jsonl:7" and second["finished"]["base"] is False
    assert second["metrics"]["exact_match"] == {"base": 0.0, "tuned": 1.0}
    answers["silent"] = [Answer("", True), Answer(" \n", False)]
    predictions.answer("silent", cast(Any, "silent"))
    assert caplog.messages == ["sums: 2 of 2 answers of silent are empty"]


@pytest.mark.parametrize(("start", "end"), [(None, 64), (0, None)], ids=["decoder", "pair"])
def test_answers_to_held_out_prompts_end_with_the_context_of_a_decoder(
    start: int | None, end: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def answer(*_: object, context_len: int | None, **__: object) -> Any:
        seen.append(context_len)
        return iter([[(0, Answer("4", True))]])

    monkeypatch.setattr(evaluator_module, "answer_batches", answer)
    rows = {"sums": [Prompt([1, 2], "4", Origin("sums.jsonl", 1))]}
    spec = SimpleNamespace(context_len=64, decoder_start_token_id=start)
    base: Any = SimpleNamespace(spec=spec, stop_ids={2}, tokenizer=None, backend="sdpa")
    data: Any = SimpleNamespace(
        stop_token_ids=set(), sequence_len=32, prompts=lambda max_rows: rows
    )
    config = EvaluationConfig(exact_match=True)
    evaluator = Evaluator(config, base, data, [], cast(Any, None))
    evaluator.predictions.answer("base", cast(Any, None))
    assert seen == [end]


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("adapter", "count"), [("lora", 3), ("full", 1)])
def test_a_run_shows_answers_of_both_models(
    adapter: str, count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (f"adapter={adapter}", f"evaluation.show_answers={count}", "trainer.max_steps=1")
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


def test_a_model_that_cannot_answer_does_not_fail_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("this architecture does not generate")

    monkeypatch.setattr(evaluator_module, "answer_batches", fail)
    folder = train_into(tmp_path / "run", "evaluation.show_answers=3", "trainer.max_steps=1")
    assert (folder / "metrics.json").exists() and not (folder / "predictions.jsonl").exists()
    log = (folder / "train.log").read_text()
    assert "answers are not shown: this architecture does not generate" in log
    with pytest.raises(RuntimeError, match="does not generate"):
        train_into(tmp_path / "measured", "evaluation.exact_match=true", "trainer.max_steps=1")
