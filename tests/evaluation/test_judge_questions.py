"""Questions and references in MT-bench's format, their errors by file and line, and the page."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.evaluate import _verdicts_page
from app.evaluation.judge.endpoint import JudgeReply
from app.evaluation.judge.grading import Bench, Judgement, JudgeRequest, Verdict
from app.evaluation.judge.questions import JudgeConfig, JudgeQuestion, read_questions
from common.errors import UserError


def write_lines(file: Path, *rows: Any) -> Path:
    file.parent.mkdir(exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    file.write_text("\n".join(lines) + "\n")
    return file


def test_a_folder_has_questions_and_their_references(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = {"question_id": 81, "category": "math", "turns": ["2 + 2?", "And 1 more?"]}
    other = {"question_id": 82, "turns": ["Hello"]}
    file = write_lines(tmp_path / "bench" / "question.jsonl", one, "", other)
    answers = {"question_id": 81, "choices": [{"index": 0, "turns": ["4", "5"]}]}
    unused = {"question_id": 99, "choices": [{"turns": ["4"]}]}
    write_lines(tmp_path / "bench" / "reference_answer_x.jsonl", answers, unused)
    expected = [
        JudgeQuestion("81", "math", ("2 + 2?", "And 1 more?"), ("4", "5")),
        JudgeQuestion("82", "general", ("Hello",)),
    ]
    assert read_questions(file.parent) == expected
    assert not caplog.records
    assert [question.reference for question in read_questions(file, max_questions=1)] == [()]
    assert "1 questions of math, reasoning, coding have no reference answer" in caplog.text
    bench = Bench(JudgeConfig(questions=str(file), url="https://host/v1", model="m"), 1)
    assert bench.name == "bench"


def test_all_problems_are_listed_by_line(tmp_path: Path) -> None:
    good = {"question_id": 1, "turns": ["Hello", "Again"]}
    rows: list[Any] = [good, [1], {"id": 1}, good, {**good, "question_id": 2, "turns": ["Hi", " "]}]
    file = write_lines(tmp_path / "q.jsonl", *rows)
    answers = {"question_id": 1, "choices": [{"turns": ["x"]}]}
    with pytest.raises(UserError) as failed:
        read_questions(file, write_lines(tmp_path / "r.jsonl", answers))
    assert [each.replace(f"{tmp_path}/", "") for each in failed.value.problems] == [
        "q.jsonl:2 is a JSON list; expected an object",
        "q.jsonl:3 has no question_id and no turns; found ['id']",
        "q.jsonl:4 duplicate question_id 1",
        "q.jsonl:5 turns: expected a list of non-empty questions",
        "r.jsonl:1 has 1 answers, but question 1 has 2 turns",
    ]


def test_the_page_escapes_model_and_judge_output_and_needs_no_network() -> None:
    hostile = "<script>alert(1)</script>"
    question = JudgeQuestion("q", hostile, (hostile, hostile), (hostile, hostile))
    bench: Any = SimpleNamespace(
        name=hostile,
        config=JudgeConfig(model=hostile),
        questions=[question],
        answers={"base": {"q": [hostile] * 2}, "tuned": {"q": [""] * 2}},
    )
    requests = [JudgeRequest(question, turn, "tuned", False, []) for turn in range(2)]
    judged = Judgement([Verdict(request, 7.0, JudgeReply(hostile)) for request in requests], 2)
    page = _verdicts_page(bench, judged)
    assert "<script" not in page and "http" not in page.replace("http-equiv", "")
    # Twice in the title and the heading; category, question, reference, answer, reply of each turn.
    assert page.count(escape(hostile)) == 2 * 2 + 1 + 2 * 5
    assert page.count("tuned, 7 of 10") == 2 and page.count("(empty)") == 2
