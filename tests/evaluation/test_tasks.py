"""Tasks in their published form, their scores, and the errors of their settings and rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.evaluation.generation import EvaluationConfig
from app.evaluation.likelihood import Likelihood
from app.evaluation.tasks.forms import FORMS, MMLU_CATEGORIES, boxed, math_answer
from app.evaluation.tasks.measure import aggregate, program_passes, score_answer, score_likelihoods
from app.evaluation.tasks.questions import (
    Question,
    Task,
    TaskConfig,
    build_tasks,
    check_tasks,
    hide_needles,
)
from common.errors import UserError


def task_of(name: str, **settings: Any) -> Task:
    config = EvaluationConfig(tasks=[TaskConfig(name=name, **settings)], allow_code=True)
    (task,) = build_tasks(config)
    return task


def write_rows(folder: Path, *rows: dict[str, Any]) -> str:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def first_question(name: str, **settings: Any) -> Question:
    return task_of(name, **settings).questions()[0]


def test_every_named_task_ships_a_sample() -> None:
    for task in map(task_of, FORMS):
        questions = task.questions()
        assert task.is_sample and len(questions) >= 2, task.name
        assert all(question.item.reference for question in questions), task.name


def count_words(text: str) -> int:
    return len(text.split())


def test_needles_are_hidden_at_each_depth_of_texts_that_are_as_long_as_asked() -> None:
    task = task_of("needle", lengths=[200, 300], depths=[0, 0.5, 1])
    hidden = hide_needles(task, task.questions(), 400, count_words)
    assert len(hidden) == 2 * 3 * 6
    for question in hidden:
        length, _, depth = question.item.group.partition(" at ")
        (prompt,), needle = question.item.contexts, question.item.needle
        # The answer has 16 tokens, and a sentence 6 words.
        assert int(length) - 16 - 6 < count_words(prompt) <= int(length) - 16
        assert prompt.count(needle) == 1 and prompt.count("Question:") == 1
        text = prompt.partition("\n\nQuestion:")[0]
        place = text.index(needle) / (len(text) - len(needle))
        assert abs(place - float(depth)) < 0.02
    assert {
        q.item.group for q in hide_needles(task_of("needle"), hidden[:2], 800, count_words)
    } == {f"{length} at {depth}" for length in (200, 400, 800) for depth in (0, 0.25, 0.5, 0.75, 1)}


def test_needles_may_be_hidden_in_a_text_of_ones_own(tmp_path: Path) -> None:
    row = {"needle": "It is 7.", "question": "What is it?", "answer": "7"}
    alone = task_of("mine", form="needle", path=write_rows(tmp_path, row), lengths=[128])
    with pytest.raises(UserError, match=r"rows.jsonl:1: .*add rows, or a column haystack"):
        hide_needles(alone, alone.questions(), 256, count_words)
    with pytest.raises(UserError, match=r"of 128 tokens exceeds .* 64; type lengths: \[64\]"):
        hide_needles(alone, alone.questions(), 64, count_words)
    write_rows(tmp_path, row | {"haystack": "One day. Two nights! Three?"})
    question = hide_needles(alone, alone.questions(), 256, count_words)[0]
    assert question.item.contexts[0].startswith("It is 7. One day. Two nights! Three? One day.")
    right = score_answer(alone, question, " 7.\nQuestion", is_finished=False)
    assert right["metrics"] == {"exact_match": 1.0} and right["finished"]


def test_prompts_are_those_of_the_harness() -> None:
    assert first_question("arc").pairs[0] == (
        "Question: What do plants take in through their roots?\nAnswer:",
        " water",
    )
    assert first_question("hellaswag").pairs[0] == (
        "Washing dishes: A woman stands at a sink. She fills it with water and",
        " adds soap to it.",
    )
    tea = task_of("hellaswag").questions()[1]  # without the markup of WikiHow
    assert tea.pairs[0][0] == "Making tea: How to make tea. Boil the water."
    assert first_question("winogrande").pairs == [
        ("The cup did not fit on the shelf because the cup", " was too wide."),
        ("The cup did not fit on the shelf because the shelf", " was too wide."),
    ]
    assert first_question("openbookqa").pairs[1] == (
        "A puddle is gone after a sunny day because the water",
        " evaporated",
    )
    boolq = first_question("boolq")
    assert boolq.pairs[1][0].endswith("\nQuestion: do bees make honey?\nAnswer:")
    assert [end for _, end in boolq.pairs] == [" no", " yes"] and boolq.item.correct == 1
    assert first_question("lambada").pairs[0][1] == " ball"
    mmlu = first_question("mmlu", few_shot=0)
    assert mmlu.item.contexts[0] == (
        "The following are multiple choice questions (with answers) about global facts.\n\n"
        "Which is the largest of these?\n"
        "A. a village\nB. a country\nC. a town\nD. a street\nAnswer:"
    )
    assert [end for _, end in mmlu.pairs] == [" A", " B", " C", " D"]


def test_few_shot_examples_are_of_the_same_subject_and_have_answers() -> None:
    task = task_of("mmlu")
    for question in task.questions():
        text = question.item.contexts[0]
        assert text.count("\nAnswer: ") == 5 and text.endswith("\nAnswer:")
        assert question.item.group.replace("_", " ") in text.splitlines()[0]
    assert "\nD. Tokyo\nAnswer: B\n\n" in task.questions()[0].item.contexts[0]
    assert len(MMLU_CATEGORIES) == 57
    task = task_of("gsm8k")  # has no file of examples: they are its first rows
    questions = task.questions()
    assert [question.origin.line for question in questions] == [6, 7, 8]
    assert questions[0].item.contexts[0].count("#### ") == 5
    assert questions[0].item.contexts[0].endswith("not in a box?\nAnswer:")


def test_columns_can_have_other_names_and_lambada_one_text(tmp_path: Path) -> None:
    file = write_rows(tmp_path, {"text": "the old man sat down"})
    assert first_question("lambada", path=file).pairs == [("the old man sat", " down")]
    file = write_rows(tmp_path, {"q": {"text": "2 + 2?"}, "options": ["3", "4"], "solution": "B"})
    columns = {"question": "q.text", "choices": "options", "answer": "solution"}
    question = first_question("mine", path=file, kind="multiple_choice", columns=columns)
    assert question.pairs == [("2 + 2?", " 3"), ("2 + 2?", " 4")]
    assert question.item.correct == 1


@pytest.mark.parametrize(
    ("name", "answer", "correct"),
    [("mmlu", 2, 2), ("mmlu", "C", 2), ("mmlu", "2", 2), ("mine", 2, 2), ("mine", "2", 1)],
)
def test_an_integer_answer_is_an_index_and_a_string_a_label_or_text(
    name: str, answer: Any, correct: int, tmp_path: Path
) -> None:
    row = {"question": "q", "choices": ["8", "2", "24", "120"], "answer": answer, "subject": "s"}
    settings = {"few_shot": 0} if name == "mmlu" else {"kind": "multiple_choice"}
    question = first_question(name, path=write_rows(tmp_path, row), **settings)
    assert question.item.correct == correct


@pytest.mark.parametrize(
    ("settings", "row", "words"),
    [
        ({"name": "mmul"}, {}, ["not a known task; did you mean mmlu?", "hellaswag"]),
        ({"name": "mine", "kind": "numeric"}, None, ["type the file with the rows of mine"]),
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
            ["answer 'c' is not one of the 2 choices"],
        ),
        ({"name": "math"}, {"problem": "p", "solution": "4"}, ["no \\boxed{...}"]),
    ],
)
def test_errors_of_tasks_name_the_cause(
    settings: dict[str, Any], row: dict[str, Any] | None, words: list[str], tmp_path: Path
) -> None:
    if row is not None:
        settings = {"path": write_rows(tmp_path, row or {"a": 1})} | settings
    problems = "\n".join(check_tasks(EvaluationConfig(tasks=[TaskConfig(**settings)])))
    assert all(word in problems for word in words), problems


def test_tasks_need_names_of_their_own_and_rows_besides_their_examples(tmp_path: Path) -> None:
    config = EvaluationConfig(tasks=[TaskConfig(name="arc"), TaskConfig(name="arc")])
    assert "another task has this name" in check_tasks(config)[0]
    file = write_rows(tmp_path, *[{"question": "q", "answer": "3"}] * 2)
    with pytest.raises(UserError, match="none is left to evaluate"):
        task_of("mine", path=file, kind="numeric", few_shot=2).questions()


def test_accuracy_and_length_normalized_accuracy() -> None:
    found = [Likelihood(-4.0, 2, False), Likelihood(-5.0, 2, False)]
    question = first_question("openbookqa")  # froze, evaporated (right), ...
    result = score_likelihoods(task_of("openbookqa"), question, [*found, found[1], found[1]])
    assert result["answer"] == "froze"
    assert result["metrics"] == {"accuracy": 0.0, "accuracy_norm": 1.0, "loss": 2.5}


def test_losses_are_means_over_tokens() -> None:
    rows = [
        {"metrics": {"accuracy": 1.0, "loss": 1.0}, "logprob": -1.0, "tokens": 1, "bytes": 4},
        {"metrics": {"accuracy": 0.0, "loss": 2.0}, "logprob": -6.0, "tokens": 3, "bytes": 8},
    ]
    found = aggregate("likelihood", rows)
    assert found == pytest.approx({"accuracy": 0.5, "loss": 7 / 4, "perplexity": 2.718281828**3.5})
    found = aggregate("perplexity", rows)
    assert found["perplexity"] == pytest.approx(2.718281828**1.75)
    assert found["bits_per_byte"] == pytest.approx(7 / 12 / 0.69314718)


def test_an_answer_is_cut_at_its_stop_text() -> None:
    task = task_of("gsm8k")
    question = task.questions()[0]
    text = " 250 - 240 = 10\n#### 10\n\nQuestion: How many are 3 + 4? 7"
    result = score_answer(task, question, text, False)
    assert result["metrics"] == {"numeric": 1.0} and result["finished"]
    assert score_answer(task, question, "", True)["metrics"] == {"numeric": 0.0}


def test_final_answers_of_math_are_normalized() -> None:
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


def test_programs_run_within_limits(tmp_path: Path) -> None:
    task = task_of("humaneval")
    right, other = task.questions()
    for question, text, metric in (
        (right, right.item.reference, 1.0),
        (right, other.item.reference, 0.0),
        (right, "    return 2 * x\n\nprint('more')", 1.0),
    ):
        assert score_answer(task, question, text, True)["metrics"] == {"passed": metric}
    assert program_passes("assert 1 + 1 == 2")
    assert not program_passes("import sys\nsys.exit()\nassert 1 + 1 == 3"), (
        "exited before its checks"
    )
    assert not program_passes("while True: pass", seconds=0.3)
    assert not program_passes("x = 'a' * (1 << 31)")
    assert not program_passes(f"open({str(tmp_path / 'big')!r}, 'wb').write(bytes(1 << 22))")
    assert not program_passes("import os; assert os.environ.get('HOME')")
