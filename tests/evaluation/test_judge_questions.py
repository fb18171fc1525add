"""Questions and references in MT-bench's format, their errors by file and line, and the page."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.evaluate import _verdicts_page
from app.evaluation.judge.grading import Bench, Judgement, JudgeRequest, Verdict
from app.evaluation.judge.questions import JudgeConfig, Question, read_questions
from common.errors import UserError
from common.installation import ROOT

SAMPLE = ROOT / "data_modules" / "samples" / "mt_bench"
SHARED = ROOT.parent / "shared" / "data" / "eval" / "mt_bench"


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
        Question("81", "math", ("2 + 2?", "And 1 more?"), ("4", "5")),
        Question("82", "general", ("Hello",)),
    ]
    assert read_questions(file.parent) == expected
    assert not caplog.records
    assert [question.reference for question in read_questions(file, max_questions=1)] == [()]
    assert "1 questions of math, reasoning, coding have no reference answer" in caplog.text
    bench = Bench(JudgeConfig(questions=str(file), url="https://host/v1", model="m"), 1)
    assert bench.name == "bench"


def test_all_problems_are_listed_by_line(tmp_path: Path) -> None:
    good = {"question_id": 1, "turns": ["Hello", "Again"]}
    rows: list[Any] = [good, "{", [1], {"id": 1}, good]
    rows += [{**good, "question_id": 2, "turns": ["Hi", " "]}]
    rows += [{**good, "question_id": 3, "reference": ["one"]}]
    file = write_lines(tmp_path / "q.jsonl", *rows)
    references = write_lines(
        tmp_path / "r.jsonl", {"question_id": 1, "choices": [{"turns": ["x"]}]}, {}
    )
    with pytest.raises(UserError) as failed:
        read_questions(file, references)
    problems = [
        problem.replace(f"{tmp_path}/", "").partition(":")[2] for problem in failed.value.problems
    ]
    assert problems[1:] == [
        "3 is a JSON list; expected an object",
        "4 has no question_id and no turns; found ['id']",
        "5 duplicate question_id 1",
        "6 turns: expected a list of non-empty questions",
        "7 reference: expected 2 answers, one for each turn",
        "1 has 1 answers, but question 1 has 2 turns",
        "2 is not a reference answer: expected question_id and choices[0].turns, found []",
    ]
    assert problems[0].startswith("2 is not JSON")
    with pytest.raises(UserError, match="contains no questions"):
        read_questions(write_lines(tmp_path / "empty.jsonl"))


def test_the_sample_has_a_question_of_each_category_and_the_needed_references() -> None:
    questions = read_questions(SAMPLE)
    assert len({question.category for question in questions}) == len(questions) == 8
    assert all(len(question.turns) == 2 for question in questions)
    assert {q.category for q in questions if q.reference} >= {"math", "reasoning", "coding"}


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs MT-bench's own files")
def test_mt_benchs_own_files_are_read() -> None:
    questions = read_questions(SHARED)
    assert (len(questions), sum(bool(question.reference) for question in questions)) == (80, 40)


def test_the_page_escapes_model_and_judge_output_and_needs_no_network() -> None:
    hostile = "<script>alert(1)</script>"
    question = Question("q", hostile, (hostile, hostile), (hostile, hostile))
    bench: Any = SimpleNamespace(
        name=hostile,
        config=JudgeConfig(model=hostile),
        questions=[question],
        answers={"base": {"q": [hostile] * 2}, "tuned": {"q": [""] * 2}},
    )
    requests = [JudgeRequest(question, turn, "tuned", False, []) for turn in range(2)]
    judged = Judgement([Verdict(request, 7.0, hostile) for request in requests], 2)
    page = _verdicts_page(bench, judged)
    assert "<script" not in page and "http" not in page.replace("http-equiv", "")
    # Twice in the title and the heading; category, question, reference, answer, reply of each turn.
    assert page.count(escape(hostile)) == 2 * 2 + 1 + 2 * 5
    assert page.count("tuned, 7 of 10") == 2 and page.count("(empty)") == 2
