"""The columns of public sets that people fine-tune on most: what is read, or suggested."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from common.errors import DataError, Origin
from data_modules.format import convert_row, guess_format
from data_modules.format.format import format_of
from data_modules.format.meaning import suggest_settings
from data_modules.types import Conversation, Document, Row

ORIGIN = Origin("rows.jsonl", 1)
TURNS = [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "say"}]
VALUES: dict[str, Any] = {
    "messages": TURNS,
    "conversations": TURNS,
    "choices": ["one", "two"],
    "options": {"A": "one", "B": "two"},
    "endings": ["one", "two"],
    "label": 1,
    "answers": {"text": ["one"], "answer_start": [0]},
}
"""values of columns; the others hold their own name"""
READ = {
    "tatsu-lab/alpaca": ("instruction input output text", "instruction+input -> output"),
    "databricks/databricks-dolly-15k": (
        "instruction context response category",
        "instruction+context -> response",
    ),
    "meta-math/MetaMathQA": ("type query original_question response", "query -> response"),
    "openai/gsm8k": ("question answer", "question -> answer"),
    "b-mc2/sql-create-context": ("answer question context", "question+context -> answer"),
    "Open-Orca/OpenOrca": (
        "id system_prompt question response",
        "system_prompt | question -> response",
    ),
    "hendrycks/competition_math": ("problem level type solution", "problem -> solution"),
    "HuggingFaceH4/CodeAlpaca_20K": ("prompt completion", "prompt -> completion"),
    "nomic-ai/gpt4all-j-prompt-generations": ("prompt response source", "prompt -> response"),
    "AI-MO/NuminaMath-CoT": ("source problem solution messages", "ask -> say"),
    "Open-Orca/SlimOrca": ("conversations", "ask -> say"),
    "open-thoughts/OpenThoughts-114k": ("system conversations", "system | ask -> say"),
    "allenai/c4": ("text timestamp url", "text"),
}
"""columns, and the texts that a row becomes; one set of those with the same columns"""
ASKED = {
    "nvidia/OpenMathInstruct-2": ("problem generated_solution expected_answer", "not recognized"),
    "FreedomIntelligence/medical-o1-reasoning-SFT": (
        "Question Complex_CoT Response",
        "columns: {instruction: Question, output: Response}",
    ),
    "rajpurkar/squad": (
        "id title context question answers",
        "columns: {instruction: question, input: context, output: answers.text.0}",
    ),
    "EdinburghNLP/xsum": ("document summary id", "not recognized"),
    "cais/mmlu": ("question subject choices answer", "questions with 'choices'"),
    "Rowan/hellaswag": ("ind activity_label ctx endings label", "questions with 'endings'"),
    "stanfordnlp/imdb": ("text label", "columns: {instruction: text, output: label}"),
    "Anthropic/hh-rlhf": ("chosen rejected", "objective=dpo"),
    "Intel/orca_dpo_pairs": ("system question chosen rejected", "objective=dpo"),
}
"""columns whose meaning a person has to say, and words of the answer that helps to say it"""


def row_of(columns: str) -> Row:
    values = {name: VALUES.get(name, name) for name in columns.split()}
    return Row(values | {"answer": 1} if "choices" in values else values, ORIGIN)


@pytest.mark.parametrize("name", READ)
def test_a_public_set_is_read_without_columns(name: str) -> None:
    columns, expected = READ[name]
    row = row_of(columns)
    (item,) = convert_row(row, guess_format([row], {}), {})
    if isinstance(item, Document):
        assert " -> ".join(segment.text for segment in item.segments) == expected
        return
    assert isinstance(item, Conversation)
    *asked, answer = [turn.content.replace("\n\n", "+") for turn in item.turns]
    assert f"{' | '.join(asked)} -> {answer}" == expected


@pytest.mark.parametrize("name", ASKED)
def test_a_public_set_of_unclear_meaning_is_answered(name: str) -> None:
    columns, words = ASKED[name]
    with pytest.raises(DataError) as refused:
        guess_format([row_of(columns)], {})
    assert words in str(refused.value) and "choices.0" not in str(refused.value)


def test_a_text_may_be_a_choice_and_columns_that_are_named_are_all_that_is_read() -> None:
    choice = {"question": "q", "options": {"A": "one", "B": "two"}, "answer": "A"}
    with pytest.raises(DataError, match="questions with 'options'"):
        guess_format([Row(choice, ORIGIN)], {})
    assert guess_format([Row(choice | {"answer": "one"}, ORIGIN)], {}) == "alpaca"
    row = Row({"question": "q", "context": "c", "system_prompt": "s", "answer": "a"}, ORIGIN)
    (item,) = convert_row(row, "alpaca", {"instruction": "question", "output": "answer"})
    assert isinstance(item, Conversation)
    assert [turn.content for turn in item.turns] == ["q", "a"]


def test_the_suggested_settings_read_the_row() -> None:
    rows: list[tuple[dict[str, Any], list[str]]] = [
        ({"question": "q", "reply": "a"}, ["q", "a"]),
        ({"question": "q", "context": "c", "answers": ["a", "b"]}, ["q\n\nc", "a"]),
        ({"instruction": "q", "instances": [{"input": "c", "output": "a"}]}, ["q\n\nc", "a"]),
        ({"id": 1, "dialog": TURNS}, ["ask", "say"]),
        ({"line": "once"}, ["once"]),
    ]
    for values, texts in rows:
        assert format_of(values) is None
        found = yaml.safe_load("{" + suggest_settings(values) + "}")
        (item,) = convert_row(Row(values, ORIGIN), found["format"], found["columns"])
        if isinstance(item, Conversation):
            assert [turn.content for turn in item.turns] == texts
        else:
            assert [part.text for part in item.segments] == texts  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "values",
    [
        {"messages": [], "loss": ""},
        {"question": "q", "answers": [" ", "a"]},
        {"question": {"text": ""}, "answer": "a"},
    ],
)
def test_no_empty_text_is_suggested(values: dict[str, Any]) -> None:
    assert not suggest_settings(values)
