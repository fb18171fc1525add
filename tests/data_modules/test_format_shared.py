"""Every row of the real data sets is converted, without losing calls, tools or answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.errors import Origin
from data_modules.format import convert_row
from data_modules.format.format import apply_columns, format_of
from data_modules.types import Conversation, Item, Row
from tests.data_modules.conftest import SHARED

pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="no shared data")

NESTED = {
    "instruction": "instruction",
    "input": "instances.0.input",
    "output": "instances.0.output",
}


def load(file: str) -> list[dict[str, Any]]:
    """Return the rows of a file."""
    text = (SHARED / file).read_text(encoding="utf-8")
    if file.endswith(".json"):
        return json.loads(text)
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def convert(file: str, columns: dict[str, str] | None = None) -> tuple[str, list[list[Item]]]:
    """Return the guessed format and the items of each row."""
    rows = load(file)
    name = format_of(apply_columns(rows[0], columns or {}))
    assert name is not None
    return name, [
        convert_row(Row(values, Origin(file, line)), name, columns or {})
        for line, values in enumerate(rows, 1)
    ]


@pytest.mark.parametrize(
    ("file", "name", "columns"),
    [
        ("instruct/dolly_hhrlhf.jsonl", "prompt_completion", {}),
        ("instruct/gpteacher_roleplay.json", "alpaca", {}),
        ("instruct/gsm8k_alpaca.json", "alpaca", {}),
        ("instruct/identity.json", "alpaca", {}),
        ("instruct/self_instruct_seed_tasks.jsonl", "alpaca", NESTED),
        ("chat/glaive_toolcall_en.json", "sharegpt", {}),
        ("chat/sharegpt_dummy_conversation.json", "sharegpt", {}),
        ("text/c4_demo.jsonl", "completion", {}),
        ("preference/kto_en_demo.json", "messages", {}),
    ],
)
def test_every_row_is_one_item(file: str, name: str, columns: dict[str, str]) -> None:
    guessed, items = convert(file, columns)
    assert guessed == name
    assert {len(row) for row in items} == {1}


def test_calls_and_tools_of_glaive() -> None:
    _, items = convert("chat/glaive_toolcall_en.json")
    for (item,), row in zip(items, load("chat/glaive_toolcall_en.json"), strict=True):
        assert isinstance(item, Conversation)
        expected = [
            json.loads(turn["value"])
            for turn in row["conversations"]
            if turn["from"] == "function_call"
        ]
        calls = [call for turn in item.turns for call in turn.tool_calls]
        assert [{"name": call.name, "arguments": call.arguments} for call in calls] == expected
        assert [tool["function"] for tool in item.tools] == json.loads(row["tools"])
        assert len(item.turns) == len(row["conversations"])


def test_every_answer_of_the_oasst_trees_is_trained_on_once() -> None:
    name, trees = convert("chat/oasst_trees.jsonl")
    assert name == "oasst"
    for items, row in zip(trees, load("chat/oasst_trees.jsonl"), strict=True):
        answers, todo = [], [row["prompt"]]
        while todo:
            node = todo.pop()
            todo += node["replies"]
            if node["role"] == "assistant":
                answers.append(node["text"])
        turns = [turn for item in items for turn in item.turns if turn.role == "assistant"]
        assert sorted(turn.content for turn in turns if turn.weight != 0) == sorted(answers)
        assert all(item.turns[-1].role == "assistant" for item in items)
