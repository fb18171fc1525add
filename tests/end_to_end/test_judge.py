"""An evaluation that only measures answers judged over HTTP."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from app.assembly.base import open_reward_model
from app.evaluation.judge import endpoint, grading
from app.evaluation.judge.endpoint import JudgeError
from common.errors import UserError
from tests.in_process import run_into
from tests.runs import metrics_of
from tests.tiny import SAMPLES, small_base, train_into
from tools.sample_judge import MODEL, Handler, serving

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_into(tmp_path_factory.mktemp("judged") / "run") / "adapter"


def judge_answers(adapter: Path, folder: Path, *words: str) -> dict[str, float]:
    return run_into(
        *("evaluate", folder, f"model.path={small_base()}", f"adapter_path={adapter}"),
        *("evaluation=mt_bench", "evaluation.judge.max_new_tokens=8"),
        *(f"data.cache_dir={adapter.parent / 'cache'}", *words),
    )


def judged(url: str, adapter: Path, folder: Path) -> dict[str, float]:
    words = [f"evaluation.judge.url={url}", f"evaluation.judge.model={MODEL}"]
    words += ["evaluation.judge.max_questions=3", "evaluation.judge.max_retries=0"]
    return judge_answers(adapter, folder, *words)


def test_answers_are_saved_if_the_judge_fails(
    adapter: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint, "FIRST_WAIT", 0.01)
    answered = 0

    class Dies(Handler):
        def do_POST(self) -> None:
            nonlocal answered
            answered += 1
            if answered > 6:
                BaseHTTPRequestHandler.send_error(self, 503, "no more")
            else:
                super().do_POST()

    with serving(Dies) as url, pytest.raises(JudgeError, match="type the command again"):
        judged(url, adapter, tmp_path / "first")
    printed = capsys.readouterr().out
    assert "judged by words_in_common" in printed and f"run: {tmp_path / 'first'}" in printed
    left = {file.name for file in (tmp_path / "first").iterdir()}
    assert {"judge.html", "judge_answers.jsonl", "verdicts.jsonl", "metrics.json"} <= left
    with serving() as url:
        metrics = judged(url, adapter, tmp_path / "second")
    assert metrics["tuned/judge"] >= 1 and metrics["base/judge/writing"] >= 1
    assert 0 <= metrics["tuned/judge_wins"] <= 1 and "change/judge/mt_bench/low" in metrics
    assert metrics == metrics_of(tmp_path / "second")
    verdicts = (tmp_path / "second" / "verdicts.jsonl").read_text().splitlines()
    assert len(verdicts) == 3 * 2 * 4


@pytest.fixture(scope="module")
def reward_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = ["objective=reward", "trainer.max_steps=2", "optimizer.lr=1e-2"]
    words.append(f"data.datasets=[{{path: {SAMPLES / 'pairs.json'}}}]")
    return train_into(tmp_path_factory.mktemp("reward") / "run", *words)


def test_a_reward_model_rates_what_transformers_does(
    reward_run: Path, adapter: Path, tmp_path: Path
) -> None:
    run_into("merge", tmp_path / "merged", f"run={reward_run}")
    words = ("evaluation.judge.max_questions=2", "evaluation.judge.best_of=3")
    by_run, by_merged = (
        judge_answers(
            *(adapter, tmp_path / f"by-{judge.name}"),
            *(*words, f"evaluation.judge.reward_model={judge}"),
        )
        for judge in (reward_run, tmp_path / "merged")
    )
    assert by_run.keys() == by_merged.keys()
    for name in (name for name in by_run if "reward" in name):
        assert by_run[name] == pytest.approx(by_merged[name], rel=1e-3), name
    assert by_run["tuned/reward_of_best"] > by_run["tuned/reward_of_first"]
    assert "change/reward/mt_bench/low" in by_run
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").float().eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    answers = (tmp_path / "by-merged" / "judge_answers.jsonl").read_text().splitlines()
    expected = []
    for line in map(json.loads, answers):
        messages = []
        for question, answer in zip(line["turns"], line["tuned"], strict=True):
            messages += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
            text = tokenizer.apply_chat_template(messages, tokenize=False).rstrip("\n")
            ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
            with torch.no_grad():
                expected.append(model(ids).logits.item())
    assert by_merged["tuned/reward"] == pytest.approx(np.mean(expected), abs=1e-4)


def test_a_model_without_a_head_for_a_reward_is_no_judge(adapter: Path) -> None:
    for path in (str(adapter.parent), str(small_base())):
        with pytest.raises(UserError, match="no head for a reward"):
            open_reward_model(path, "cpu")


def test_an_evaluation_interrupted_during_judging_continues(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    plain = grading.answer_prompts

    def counting(*args: Any, **options: Any) -> Any:
        calls.append("answers")
        return plain(*args, **options)

    monkeypatch.setattr(grading, "answer_prompts", counting)

    class Counts(Handler):
        def do_POST(self) -> None:
            calls.append("verdict")
            super().do_POST()

    def killed(count: int, total: int) -> None:
        if count == 5:
            raise KeyboardInterrupt

    folder = tmp_path / "out"
    with serving(Counts) as url:
        with monkeypatch.context() as first, pytest.raises(KeyboardInterrupt):
            first.setattr(grading, "_log_progress", killed)
            judged(url, adapter, folder)
        assert calls.count("answers") == 2 * 2  # base and tuned, once per turn
        assert not (folder / "metrics.json").exists()
        calls.clear()
        metrics = judged(url, adapter, folder)
    assert "answers" not in calls
    assert len(calls) <= 3 * 2 * 4 - 5  # five verdicts were cached
    assert "tuned/judge" in metrics and not (folder / "partial").exists()
