"""An evaluation that only measures answers judged over HTTP."""

from __future__ import annotations

import json
import os
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from app.config import load_config
from app.evaluate import evaluate
from app.evaluation.judge import bench, endpoint, grading
from app.evaluation.judge.endpoint import JudgeError
from tests.tiny import small_base, train_into
from tools.sample_judge import MODEL, Handler, serving

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_into(tmp_path_factory.mktemp("judged") / "run") / "adapter"


def judged(url: str, adapter: Path, folder: Path) -> dict[str, float]:
    os.environ.pop("LOFT_RUN_DIR", None)
    words = [f"model.path={small_base()}", f"adapter_path={adapter}", "evaluation=mt_bench"]
    words += [f"evaluation.judge.url={url}", f"evaluation.judge.model={MODEL}"]
    words += ["evaluation.judge.max_questions=3", "evaluation.judge.max_new_tokens=8"]
    words += ["evaluation.judge.max_retries=0", f"data.cache_dir={adapter.parent / 'cache'}"]
    try:
        return evaluate(load_config("evaluate", [*words, f"output.dir={folder}"]))
    finally:
        os.environ.pop("LOFT_RUN_DIR", None)


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
    assert metrics == json.loads((tmp_path / "second" / "metrics.json").read_text())
    verdicts = (tmp_path / "second" / "verdicts.jsonl").read_text().splitlines()
    assert len(verdicts) == 3 * 2 * 4


def test_an_evaluation_interrupted_during_judging_continues(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    plain = bench.answer_prompts

    def counting(*args: Any) -> Any:
        calls.append("answers")
        return plain(*args)

    monkeypatch.setattr(bench, "answer_prompts", counting)

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
