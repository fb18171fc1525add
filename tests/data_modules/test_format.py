"""What rows mean, and what is said about rows that mean nothing."""

from __future__ import annotations

from typing import Any

import pytest

from data_modules.format import (
    MissingColumnError,
    RowError,
    check_columns,
    check_format,
    convert_row,
    guess_format,
)
from data_modules.types import Conversation, Document, Origin, Row

ORIGIN = Origin("rows.json", 7)
ASK = {"role": "user", "content": "q"}
SAY = {"role": "assistant", "content": "a"}


def convert(values: dict[str, Any], name: str | None = None, **columns: str) -> Any:
    """Convert one row, by its guessed format when none is named."""
    name = name or guess_format(values)
    assert name is not None
    return convert_row(Row(values, ORIGIN), name, columns)


def turns(item: Any) -> list[tuple[str, str]]:
    """Return role and content of each turn."""
    assert isinstance(item, Conversation) and item.origin == ORIGIN
    return [(turn.role, turn.content) for turn in item.turns]


def segments(item: Any) -> list[tuple[str, float]]:
    """Return text and weight of each segment."""
    assert isinstance(item, Document) and item.origin == ORIGIN
    return [(segment.text, segment.weight) for segment in item.segments]


@pytest.mark.parametrize("answer", ["output", "response", "completion"])
def test_alpaca(answer: str) -> None:
    asked = [("user", "do it"), ("assistant", "done")]
    assert turns(convert({"instruction": "do it", answer: "done"})) == asked
    for empty in ("", None, "  "):
        assert turns(convert({"instruction": "do it", "input": empty, answer: "done"})) == asked
    row = {"instruction": "do it", "input": "1 2", "system": "be brief", answer: "done"}
    assert turns(convert(row)) == [
        ("system", "be brief"),
        ("user", "do it\n\n1 2"),
        ("assistant", "done"),
    ]


@pytest.mark.parametrize("column", ["messages", "conversations", "conversation"])
def test_turns_in_either_dialect(column: str) -> None:
    said = [("system", "s"), ("user", "q"), ("assistant", "a")]
    roles = [{"role": role, "content": content} for role, content in said]
    assert turns(convert({column: roles})) == said
    dialect = {"system": "system", "user": "human", "assistant": "gpt"}
    froms = [{"from": dialect[role], "value": content} for role, content in said]
    assert turns(convert({column: froms})) == said
    assert turns(convert({column: froms[1:], "system": "s"})) == said


def test_turns_of_one_role_are_joined() -> None:
    item = convert({"messages": [ASK, {**ASK, "content": "r"}, SAY, {**SAY, "content": "b"}]})
    assert turns(item) == [("user", "q\n\nr"), ("assistant", "a\n\nb")]


def test_turns_of_unlike_weights_stay_apart() -> None:
    item = convert({"messages": [ASK, {**SAY, "weight": 0}, SAY]})
    assert turns(item) == [("user", "q"), ("assistant", "a"), ("assistant", "a")]


def test_weight_of_a_turn() -> None:
    item = convert({"messages": [ASK, {**SAY, "weight": 0}, ASK, {**SAY, "train": True}]})
    assert [turn.weight for turn in item.turns] == [None, 0.0, None, 1.0]


def test_content_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "value": "b"}, "c"]
    assert turns(convert({"messages": [ASK, {**SAY, "content": parts}]}))[1] == ("assistant", "abc")


@pytest.mark.parametrize("answer", ["completion", "response", "output"])
def test_prompt_completion_is_raw_text(answer: str) -> None:
    assert segments(convert({"prompt": "1+1=", answer: "2"})) == [("1+1=", 0.0), ("2", 1.0)]


def test_completion() -> None:
    for column in ("text", "content"):
        assert segments(convert({column: "once"})) == [("once", 1.0)]
    row = {"segments": [{"text": "a", "weight": 0.1}, {"text": "b"}]}
    assert segments(convert(row)) == [("a", 0.1), ("b", 1.0)]


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        (["instruction", "input", "output"], "alpaca"),
        (["id", "conversations"], "sharegpt"),
        (["messages", "text"], "messages"),
        (["prompt", "response"], "prompt_completion"),
        (["text", "id"], "completion"),
        (["question", "answer"], None),
        (["prompt", "text"], "completion"),
    ],
)
def test_guess(columns: list[str], name: str | None) -> None:
    assert guess_format(columns) == name


def test_columns_map_a_field_to_its_column() -> None:
    item = convert(
        {"q": "do it", "a": "done", "output": "not this"}, "alpaca", instruction="q", output="a"
    )
    assert turns(item) == [("user", "do it"), ("assistant", "done")]
    with pytest.raises(MissingColumnError, match=r"missing 'questoin'.*'question'"):
        convert({"question": "q", "output": "a"}, "alpaca", instruction="questoin")


@pytest.mark.parametrize(
    ("values", "name", "told"),
    [
        (
            {"message": []},
            "messages",
            r"missing 'messages'; found \['message'\]; did you mean 'mess",
        ),
        ({"instruction": "i"}, "alpaca", r"missing 'output'; found \['instruction'\]"),
        ({"instruction": None, "output": "a"}, None, "instruction is null, not text"),
        ({"instruction": "i", "output": 42}, None, "output is int 42, not text"),
        ({"messages": []}, None, "messages is empty"),
        ({"messages": None}, None, "messages is null, not a list"),
        ({"messages": [ASK, "a"]}, None, r"messages\[1\] is str; a turn is"),
        ({"messages": [ASK, {**SAY, "content": None}]}, None, r"messages\[1\].content is null"),
        ({"messages": [ASK, {**SAY, "content": 3}]}, None, r"messages\[1\].content is int 3"),
        ({"messages": [ASK, {"role": "assistant"}]}, None, r"messages\[1\] has no content"),
        (
            {"messages": [{**ASK, "content": [{"type": "text", "text": "x"}, {"type": "image"}]}]},
            None,
            r"messages\[0\].content\[1\] is image: not supported",
        ),
        (
            {"messages": [{"role": "usr", "content": "q"}]},
            None,
            r"messages\[0\] has role 'usr'; known",
        ),
        ({"messages": [SAY, ASK]}, None, "an assistant turn comes before any user turn"),
        (
            {"messages": [ASK, {"role": "system", "content": "s"}, SAY]},
            None,
            "system turn comes after",
        ),
        (
            {"messages": [ASK, {**SAY, "tool_calls": [{}]}]},
            None,
            r"\[1\].tool_calls is not supported",
        ),
        ({"messages": [ASK, {**SAY, "weight": -1}]}, None, r"\[1\].weight is -1; a weight is"),
        ({"segments": [{"text": "a", "weight": float("nan")}]}, None, r"\[0\].weight is nan"),
        ({"segments": []}, None, "segments is not a list"),
        ({"segments": [{"weight": 1}]}, None, r"segments\[0\] is not {text, weight}"),
        ({"text": None}, None, "text is null"),
        (
            {"text": "caf\u00e9 \ud83d"},
            None,
            r"text has half of a character pair, '.ud83d', at char",
        ),
    ],
)
def test_what_is_told_about_a_row(values: dict[str, Any], name: str | None, told: str) -> None:
    with pytest.raises(RowError, match=told):
        convert(values, name)


def test_unknown_names_are_told_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown format 'alpacca'; did you mean 'alpaca'\?"):
        check_format("alpacca")
    with pytest.raises(
        ValueError, match=r"'alpaca' has no field 'instuction'; did you mean 'instr"
    ):
        check_columns("alpaca", {"instuction": "q"})
    check_columns("alpaca", {"instruction": "q", "response": "a"})
