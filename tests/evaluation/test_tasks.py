"""Named tasks are asked in their published form; what cannot be asked is said before a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.evaluation.generation import EvaluationConfig
from app.evaluation.likelihood import Likelihood
from app.evaluation.tasks.forms import FORMS, MMLU_CATEGORIES, boxed, math_answer
from app.evaluation.tasks.measure import answered, passes, result_of, totals
from app.evaluation.tasks.questions import Question, Task, TaskConfig, build_tasks, check_tasks
from app.process.errors import UserError


def task_of(name: str, **settings: Any) -> Task:
    config = EvaluationConfig(tasks=[TaskConfig(name=name, **settings)], allow_code=True)
    (task,) = build_tasks(config)
    return task


def rows_file(folder: Path, *rows: dict[str, Any]) -> str:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def first(name: str, **settings: Any) -> Question:
    return task_of(name, **settings).questions()[0]


@pytest.mark.parametrize("name", FORMS)
def test_every_named_task_has_a_sample_of_our_own(name: str) -> None:
    task = task_of(name)
    questions = task.questions()
    assert task.is_sample and len(questions) >= 2
    assert all(question.asked.reference for question in questions)


def test_prompts_are_those_of_the_harness() -> None:
    assert first("arc").pairs[0] == (
        "Question: What do plants take in through their roots?\nAnswer:",
        " water",
    )
    assert first("openbookqa").pairs[1][1] == " evaporated"
    assert first("hellaswag").pairs[0] == (
        "Washing dishes: A woman stands at a sink. She fills it with water and",
        " adds soap to it.",
    )
    tea = task_of("hellaswag").questions()[1]  # the marks of WikiHow are gone
    assert tea.pairs[0][0] == "Making tea: How to make tea. Boil the water."
    assert first("winogrande").pairs == [
        ("The cup did not fit on the shelf because the cup", " was too wide."),
        ("The cup did not fit on the shelf because the shelf", " was too wide."),
    ]
    boolq = first("boolq")
    assert boolq.pairs[1][0].endswith("\nQuestion: do bees make honey?\nAnswer:")
    assert [end for _, end in boolq.pairs] == [" no", " yes"] and boolq.asked.right == 1
    assert first("lambada").pairs[0][1] == " ball"
    mmlu = first("mmlu", few_shot=0)
    assert mmlu.asked.contexts[0] == (
        "The following are multiple choice questions (with answers) about global facts.\n\n"
        "Which is the largest of these?\n"
        "A. a village\nB. a country\nC. a town\nD. a street\nAnswer:"
    )
    assert [end for _, end in mmlu.pairs] == [" A", " B", " C", " D"]


def test_examples_are_of_the_same_subject_and_have_their_answers() -> None:
    task = task_of("mmlu")
    for question in task.questions():
        text = question.asked.contexts[0]
        assert text.count("\nAnswer: ") == 5 and text.endswith("\nAnswer:")
        assert question.asked.group.replace("_", " ") in text.splitlines()[0]
    assert (
        "Norway\nB. Africa\nC. The Nile\nD. Tokyo\nAnswer: B\n\n"
        in (task.questions()[0].asked.contexts[0])
    )


def test_without_a_file_of_examples_the_first_rows_are_not_asked() -> None:
    task = task_of("gsm8k")
    questions = task.questions()
    assert [question.origin.line for question in questions] == [6, 7, 8]
    assert questions[0].asked.contexts[0].count("#### ") == 5
    assert questions[0].asked.contexts[0].endswith("not in a box?\nAnswer:")


def test_lambada_in_the_form_of_one_text(tmp_path: Path) -> None:
    file = rows_file(tmp_path, {"text": "the old man sat down"})
    assert first("lambada", path=file).pairs == [("the old man sat", " down")]


def test_columns_have_names_of_ones_own(tmp_path: Path) -> None:
    file = rows_file(tmp_path, {"q": {"text": "2 + 2?"}, "options": ["3", "4"], "solution": "B"})
    columns = {"question": "q.text", "choices": "options", "answer": "solution"}
    question = first("mine", path=file, kind="multiple_choice", columns=columns)
    assert question.pairs == [("2 + 2?", " 3"), ("2 + 2?", " 4")]
    assert question.asked.right == 1


@pytest.mark.parametrize(
    ("name", "answer", "right"),
    [("mmlu", 2, 2), ("mmlu", "C", 2), ("mmlu", "2", 2), ("mine", 2, 2), ("mine", "2", 1)],
)
def test_a_number_is_a_choices_place_and_a_text_is_what_it_says(
    name: str, answer: Any, right: int, tmp_path: Path
) -> None:
    row = {"question": "q", "choices": ["8", "2", "24", "120"], "answer": answer, "subject": "s"}
    settings = {"few_shot": 0} if name == "mmlu" else {"kind": "multiple_choice"}
    question = first(name, path=rows_file(tmp_path, row), **settings)
    assert question.asked.right == right


@pytest.mark.parametrize(
    ("settings", "row", "words"),
    [
        ({"name": "mmul"}, {}, ["not a known task; did you mean mmlu?", "hellaswag"]),
        ({"name": "mine", "kind": "numeric"}, None, ["type the file of mine's rows"]),
        ({"name": "arc", "kind": "numeric"}, {}, ["arc is multiple_choice"]),
        ({"name": "humaneval"}, {}, ["evaluation.allow_code=true"]),
        (
            {"name": "arc"},
            {"question": "q", "choices": ["a", "b"], "answerkey": "A"},
            ["rows.jsonl:1", "no reference 'answerKey'; did you mean answerkey?", "columns:"],
        ),
        (
            {"name": "mine", "kind": "exact_match"},
            {"question": "q", "answer": " "},
            ["rows.jsonl:1", "there is no reference"],
        ),
        (
            {"name": "mine", "kind": "multiple_choice"},
            {"question": "q", "choices": ["a", "b"], "answer": "c"},
            ["answer 'c' is none of the 2 choices"],
        ),
        (
            {"name": "mine", "kind": "multiple_choice"},
            {"question": "q", "choices": "a", "answer": 0},
            ["choices: expected a list of two or more"],
        ),
        ({"name": "math"}, {"problem": "p", "solution": "4"}, ["no \\boxed{...}"]),
        ({"name": "winogrande", "path": "not_there.jsonl"}, {}, ["not_there.jsonl"]),
    ],
)
def test_what_cannot_be_asked_is_said(
    settings: dict[str, Any], row: dict[str, Any] | None, words: list[str], tmp_path: Path
) -> None:
    if row is not None:
        settings = {"path": rows_file(tmp_path, row or {"a": 1})} | settings
    problems = "\n".join(check_tasks(EvaluationConfig(tasks=[TaskConfig(**settings)])))
    assert all(word in problems for word in words), problems


def test_a_task_of_examples_alone_asks_nothing(tmp_path: Path) -> None:
    file = rows_file(tmp_path, *[{"question": "q", "answer": "3"}] * 2)
    with pytest.raises(UserError, match="no row is left to ask"):
        task_of("mine", path=file, kind="numeric", few_shot=2).questions()


def test_two_tasks_cannot_have_one_name() -> None:
    config = EvaluationConfig(tasks=[TaskConfig(name="arc"), TaskConfig(name="arc")])
    assert "another task has this name" in check_tasks(config)[0]


def test_the_likeliest_choice_and_that_by_length() -> None:
    found = [Likelihood(-4.0, 2, False), Likelihood(-5.0, 2, False)]
    question = first("openbookqa")  # froze, evaporated (right), ...
    result = result_of(task_of("openbookqa"), question, [*found, found[1], found[1]])
    assert result["answer"] == "froze"
    assert result["metrics"] == {"accuracy": 0.0, "accuracy_norm": 1.0, "loss": 2.5}


def test_losses_are_means_over_tokens_and_perplexity_is_of_a_continuation() -> None:
    rows = [
        {"metrics": {"accuracy": 1.0, "loss": 1.0}, "logprob": -1.0, "tokens": 1, "bytes": 4},
        {"metrics": {"accuracy": 0.0, "loss": 2.0}, "logprob": -6.0, "tokens": 3, "bytes": 8},
    ]
    found = totals("likelihood", rows)
    assert found == pytest.approx({"accuracy": 0.5, "loss": 7 / 4, "perplexity": 2.718281828**3.5})
    found = totals("perplexity", rows)
    assert found["perplexity"] == pytest.approx(2.718281828**1.75)
    assert found["bits_per_byte"] == pytest.approx(7 / 12 / 0.69314718)


def test_an_answer_ends_at_its_stop_text() -> None:
    task = task_of("gsm8k")
    question = task.questions()[0]
    said = " 250 - 240 = 10\n#### 10\n\nQuestion: How many are 3 + 4? 7"
    result = answered(task, question, said, False)
    assert result["metrics"] == {"numeric": 1.0} and result["finished"]
    assert answered(task, question, "", True)["metrics"] == {"numeric": 0.0}


def test_final_answers_of_math_are_written_one_way() -> None:
    assert boxed("so \\boxed{\\frac{1}{2}} it is") == "\\frac{1}{2}"
    assert boxed("\\boxed{1") is None
    for one, other in [
        ("\\boxed{\\dfrac{1}{2}}", "The final answer is \\frac12. I hope it is correct."),
        ("$\\boxed{1,000}$", "\\boxed{1000\\text{ }}"),
        ("\\boxed{90^\\circ}", "Final answer: no; final answer is $90$."),
        ("\\boxed{\\left(1, 2\\right)}", "\\boxed{(1,2)}"),
    ]:
        assert math_answer(one) == math_answer(other) is not None
    assert math_answer("I do not know") is None


def test_mmlu_has_57_subjects() -> None:
    assert len(MMLU_CATEGORIES) == 57


def test_programs_run_within_limits(tmp_path: Path) -> None:
    task = task_of("humaneval")
    right, other = task.questions()
    for question, text, metric in (
        (right, right.asked.reference, 1.0),
        (right, other.asked.reference, 0.0),
        (right, "    return 2 * x\n\nprint('more')", 1.0),
    ):
        assert answered(task, question, text, True)["metrics"] == {"passed": metric}
    assert passes("assert 1 + 1 == 2")
    assert not passes("import sys\nsys.exit()\nassert 1 + 1 == 3"), "it left before its checks"
    assert not passes("while True: pass", seconds=1)
    assert not passes("x = 'a' * (1 << 31)")
    assert not passes(f"open({str(tmp_path / 'big')!r}, 'wb').write(bytes(1 << 22))")
    assert not passes("import os; assert os.environ.get('HOME')")
