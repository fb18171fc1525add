"""Conversion of rows, tokenized or not, and of single values; what of them is refused."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import Origin
from data_modules.format import (
    EmptyAnswerError,
    MissingColumnError,
    RowError,
    check_columns,
    check_format,
    convert_row,
    unread_in,
)
from data_modules.format.fields import check_json, check_text, read_json, read_path, read_weight
from data_modules.format.format import FORMATS, format_of
from data_modules.types import Conversation, Document, Row, Tokens

ORIGIN = Origin("rows.json", 7)
ASK = {"role": "user", "content": "q"}
SAY = {"role": "assistant", "content": "a"}


def convert(values: dict[str, Any], name: str | None = None, **columns: str) -> Any:
    name = name or format_of(values)
    assert name is not None
    (item,) = convert_row(Row(values, ORIGIN), name, columns)
    return item


def turns(item: Any) -> list[tuple[str, str]]:
    assert isinstance(item, Conversation) and item.origin == ORIGIN
    return [(turn.role, turn.content) for turn in item.turns]


def segments(item: Any) -> list[tuple[str, float]]:
    assert isinstance(item, Document) and item.origin == ORIGIN
    return [(segment.text, segment.weight) for segment in item.segments]


@pytest.mark.parametrize("answer", ["output", "response", "completion"])
def test_alpaca(answer: str) -> None:
    expected = [("user", "do it"), ("assistant", "done")]
    assert turns(convert({"instruction": "do it", answer: "done"})) == expected
    for empty in ("", None, "  "):
        assert turns(convert({"instruction": "do it", "input": empty, answer: "done"})) == expected
    row = {"instruction": "do it", "input": "1 2", "system": "be brief", answer: "done"}
    assert turns(convert(row)) == [
        ("system", "be brief"),
        ("user", "do it\n\n1 2"),
        ("assistant", "done"),
    ]


@pytest.mark.parametrize("column", ["messages", "conversations", "conversation"])
def test_turns_in_openai_and_sharegpt_form(column: str) -> None:
    fields = [("system", "s"), ("user", "q"), ("assistant", "a")]
    roles = [{"role": role, "content": content} for role, content in fields]
    assert turns(convert({column: roles})) == fields
    dialect = {"system": "system", "user": "human", "assistant": "gpt"}
    froms = [{"from": dialect[role], "value": content} for role, content in fields]
    assert turns(convert({column: froms})) == fields
    assert turns(convert({column: froms[1:], "system": "s"})) == fields


def test_turns_of_one_role_are_joined() -> None:
    item = convert({"messages": [ASK, {**ASK, "content": "r"}, SAY, {**SAY, "content": "b"}]})
    assert turns(item) == [("user", "q\n\nr"), ("assistant", "a\n\nb")]


def test_a_blank_text_adds_no_empty_lines() -> None:
    assert turns(convert({"messages": [{**ASK, "content": ""}, ASK, SAY]}))[0] == ("user", "q")
    assert turns(convert({"instruction": "", "input": "1 2", "output": "a"}))[0] == ("user", "1 2")


def test_a_system_column_comes_before_the_system_turn_unless_it_is_the_same() -> None:
    for fields, joined in (("s", "s"), ("t", "t\n\ns")):
        row = {"messages": [{"role": "system", "content": "s"}, ASK, SAY], "system": fields}
        assert turns(convert(row))[0] == ("system", joined)


def test_history_of_alpaca_comes_before_the_question() -> None:
    row = {"instruction": "c", "output": "d", "system": "s", "history": [["a", "b"], ["e", "f"]]}
    roles = ["system", "user", "assistant", "user", "assistant", "user", "assistant"]
    assert turns(convert(row)) == list(zip(roles, "sabefcd", strict=True))
    assert len(turns(convert({"instruction": "c", "output": "d", "history": []}))) == 2


def test_turns_of_different_weights_are_not_joined() -> None:
    item = convert({"messages": [ASK, {**SAY, "weight": 0}, SAY]})
    assert turns(item) == [("user", "q"), ("assistant", "a"), ("assistant", "a")]


def test_weight_of_a_row_multiplies() -> None:
    assert convert({"messages": [ASK, SAY], "weight": 0.5}).weight == 0.5
    assert convert({"conversations": [ASK, SAY], "weight": None}).weight == 1.0
    assert convert({"instruction": "i", "output": "o", "weight": 0}).weight == 0.0
    assert convert({"instruction": "i", "output": "o", "weight": "0.25"}).weight == 0.25
    assert convert({"instruction": "i", "output": "o", "weight": ""}).weight == 1.0
    row = {"segments": [{"text": "a", "weight": 0.5}, {"text": "b"}], "weight": 3}
    assert segments(convert(row)) == [("a", 1.5), ("b", 3.0)]
    row = {"prompt": "p", "completion": "c", "score": 2}
    assert segments(convert(row, weight="score")) == [("p", 0.0), ("c", 2.0)]


def test_content_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "value": "b"}, "c"]
    assert turns(convert({"messages": [ASK, {**SAY, "content": parts}]}))[1] == ("assistant", "abc")


@pytest.mark.parametrize("answer", ["completion", "response", "output"])
def test_prompt_completion_is_raw_text(answer: str) -> None:
    assert segments(convert({"prompt": "1+1=", answer: "2"})) == [("1+1=", 0.0), ("2", 1.0)]


def test_prompt_and_completion_as_turns() -> None:
    row = {"prompt": [ASK, SAY, ASK], "completion": [{**SAY, "content": "b"}], "tools": []}
    item = convert(row)
    assert turns(item) == [("user", "q"), ("assistant", "a"), ("user", "q"), ("assistant", "b")]
    assert [turn.weight for turn in item.turns] == [None, 0.0, None, None]
    with pytest.raises(RowError, match="prompt is str q and completion list; give turns in both"):
        convert({"prompt": "q", "completion": [SAY]})


@pytest.mark.parametrize(
    "values",
    [
        {"messages": [ASK, {**SAY, "content": " \n"}]},
        {"messages": [ASK, {"role": "assistant", "content": "", "reasoning": "hm"}]},
        {"instruction": "i", "output": ""},
        {"instruction": "i", "output": "o", "history": [["q", " "]]},
    ],
)
def test_an_empty_answer_has_its_own_error(values: dict[str, Any]) -> None:
    with pytest.raises(EmptyAnswerError, match=r"data\.drop_empty=true or .*=quarantine$"):
        convert(values)


def test_a_masked_empty_answer_is_no_error() -> None:
    row = {"messages": [ASK, {**SAY, "content": "", "train": False}, ASK, SAY]}
    assert turns(convert(row))[1] == ("assistant", "")


def test_completion() -> None:
    for column in ("text", "content"):
        assert segments(convert({column: "once"})) == [("once", 1.0)]
    row = {"segments": [{"text": "a", "weight": 0.1}, {"text": "b"}]}
    assert segments(convert(row)) == [("a", 0.1), ("b", 1.0)]


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        (["messages", "text"], "messages"),
        (["question", "reply"], None),
        (["prompt", "text"], "completion"),
        (["input_ids", "attention_mask", "labels", "text"], "pretokenized"),
        (["messages", "input_ids", "labels"], "messages"),
        (["input_ids"], None),
        (["message_tree_id", "tree_state", "prompt"], "oasst"),
        (["prompt", "text_id"], None),
        (["message_id", "parent_id", "text", "role", "message_tree_id"], None),
    ],
)
def test_guess(columns: list[str], name: str | None) -> None:
    assert format_of(columns) == name


def test_columns_map_a_field_to_its_column() -> None:
    item = convert(
        {"q": "do it", "a": "done", "output": "not this"}, "alpaca", instruction="q", output="a"
    )
    assert turns(item) == [("user", "do it"), ("assistant", "done")]
    with pytest.raises(MissingColumnError, match=r"missing 'questoin'.*'question'"):
        convert({"question": "q", "output": "a"}, "alpaca", instruction="questoin")


def test_missing_column_error_keeps_the_columns_of_its_row_when_pickled() -> None:
    with pytest.raises(MissingColumnError) as caught:
        convert({"instruction": "i", "reply": "a"}, "alpaca")
    # Copies are made like pickles: from the arguments and the attributes.
    for error in (caught.value, copy.copy(caught.value)):
        assert error.columns == ("instruction", "reply")
        assert str(error).startswith("missing 'output'; found ['instruction', 'reply']")


@pytest.mark.parametrize(
    ("values", "name", "expected"),
    [
        ({"instruction": "i", "respons": "a"}, "alpaca", "did you mean 'response' instead of"),
        ({"messages": None}, None, "messages is null, not a list"),
        ({"messages": [ASK, {"role": "assistant"}]}, None, r"messages\[1\] has no content"),
        (
            {"messages": [ASK, {**SAY, "tool_calls": [{}]}]},
            None,
            r"messages\[1\].tool_calls\[0\] has no tool",
        ),
        ({"messages": [{"rol": "user", "content": "q"}]}, None, r"no role.*; did you mean 'role'"),
        ({"messages": [{"role": "user", "contnet": "q"}]}, None, "did you mean 'content'"),
        ({"messages": [ASK, {**SAY, "weight": 10**400}]}, None, r"\[1\].weight is 10000"),
        ({"messages": [ASK, {**SAY, "train": "false"}]}, None, r"\[1\].train is 'false'; give"),
        ({"instruction": "i", "output": "o", "weight": "3 kg"}, None, "'3 kg', not a number"),
        ({"instruction": "i", "output": "o", "weight": "nan"}, None, "^weight is nan; a weight"),
        ({"instruction": "i", "output": "o", "history": "h"}, None, "history is str h, not a list"),
        ({"instruction": "i", "output": "o", "history": [["q"]]}, None, r"history\[0\] is list"),
        ({"segments": [{"text": "a", "weight": float("nan")}]}, None, r"\[0\].weight is nan"),
        ({"segments": [{"weight": 1}]}, None, r"segments\[0\] is not {text, weight}"),
    ],
)
def test_problems_of_a_row(values: dict[str, Any], name: str | None, expected: str) -> None:
    with pytest.raises(RowError, match=expected):
        convert(values, name)


SHORT = ("", "user", "gpt", "tool", "tool_call", "function_call", "text", "thinking")
WORDS = st.sampled_from((*SHORT, "[]", "{}", "\x00"))
TURN_NAMES = (
    *("role", "from", "content", "value", "type", "text", "name", "arguments", "tool_calls"),
    *("function", "weight", "train", "reasoning", "replies", "deleted", "id", "tool_call_id"),
    *("loss", "loss_scale", "train_detail", "parameters", "images", "label", "review_result"),
)
NAMES = st.sampled_from(TURN_NAMES)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-101, 3) | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=120)
@given(st.sampled_from(list(FORMATS)), st.data())
def test_any_row_is_converted_or_raises_row_error(name: str, data: st.DataObject) -> None:
    """Any other error would end a run without naming the row."""
    form = FORMATS[name]
    turns = st.lists(st.dictionaries(NAMES, ANYTHING), max_size=4)
    fields = {names[0]: turns | ANYTHING for names in form.required}
    columns = ("weight", "loss", "loss_scale", "loss_mask", "images", "label", "id")
    more = dict.fromkeys({*form.optional, *columns} - fields.keys(), ANYTHING)
    values = data.draw(st.fixed_dictionaries(fields, optional=more))
    try:
        items = convert_row(Row(values, ORIGIN), name, {})
    except RowError as error:
        assert str(error)
    else:
        assert items and all(item.origin == ORIGIN for item in items)
        unread = unread_in(Row(values, ORIGIN), name, {}, items)
        assert all(found in values or "." in found for found in unread)


def test_unknown_names_are_an_error_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match=r"unknown format 'alpacca'; did you mean 'alpaca'\?"):
        check_format("alpacca")
    with pytest.raises(
        ValueError, match=r"'alpaca' has no field 'instuction'; did you mean 'instr"
    ):
        check_columns("alpaca", {"instuction": "q"})
    check_columns("alpaca", {"instruction": "q", "response": "a", "weight": "score"})


TOKENS_ORIGIN = Origin("rows.parquet", 3)
FLAGS = st.lists(st.booleans(), min_size=1, max_size=20)


def to_ids(values: dict[str, Any], **columns: str) -> Tokens:
    (item,) = convert_row(Row(values, TOKENS_ORIGIN), "pretokenized", columns)
    assert isinstance(item, Tokens) and item.origin == TOKENS_ORIGIN
    return item


@given(FLAGS, st.floats(0, 10), st.integers(0, 5), st.integers(0, 5))
def test_masked_tokens_have_weight_0_and_padding_is_removed(
    is_trained: list[bool], weight: float, left: int, right: int
) -> None:
    ids = list(range(5, 5 + len(is_trained)))
    labels = [i if flag else -100 for i, flag in zip(ids, is_trained, strict=True)]
    row = {
        "input_ids": [0] * left + ids + [0] * right,
        "labels": [-100] * left + labels + [1] * right,
        "attention_mask": [0] * left + [1] * len(ids) + [0] * right,
        "weight": weight,
    }
    assert format_of(row) == "pretokenized"
    item = to_ids(row)
    assert item.input_ids == tuple(ids)
    assert item.weights == tuple(weight * flag for flag in is_trained)


def test_all_tokens_are_trained_on_if_labels_equal_ids() -> None:
    assert to_ids({"input_ids": [5, 6]}, input_ids="input_ids", labels="input_ids") == Tokens(
        (5, 6), (1.0, 1.0), TOKENS_ORIGIN
    )


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"input_ids": []}, "input_ids is empty"),
        ({"input_ids": [5, 6.0]}, r"input_ids\[1\] is float 6.0, not a whole number"),
        ({"input_ids": [5, True]}, r"input_ids\[1\] is bool True"),
        ({"input_ids": [2**31, 5]}, r"input_ids\[0\] is 2147483648"),
        ({"labels": [5]}, "labels has 1 numbers and input_ids 2"),
        ({"labels": [6, -100]}, r"labels\[0\] is 6 and input_ids\[0\] is 5; labels must equal"),
        ({"attention_mask": [0, 0]}, "masks every token"),
        ({"input_ids": [5, 6, 7], "attention_mask": [1, 0, 1]}, "not one run of 1"),
        ({"attention_mask": [1]}, "attention_mask has 1 numbers"),
        ({"weights": [1, float("nan")]}, "weights is nan"),
        ({"loss_mask": [1, -1]}, "loss_mask is -1"),
        ({"loss_mask": [1]}, "loss_mask has 1 numbers"),
    ],
)
def test_problems_of_tokens(values: dict[str, Any], expected: str) -> None:
    row = {"input_ids": [5, 6], **values}
    row.setdefault("labels", row["input_ids"])
    with pytest.raises(RowError, match=expected):
        to_ids(row)


KEYS = st.text("ab0 é\n'\U0001f600", min_size=1, max_size=5)
NESTED = st.recursive(
    st.integers(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=20,
)


def paths(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        steps = list(value.items())
    elif isinstance(value, list):
        steps = [(str(index), inner) for index, inner in enumerate(value)]
    else:
        return []
    found = []
    for step, inner in steps:
        found.append((step, inner))
        found += [(f"{step}.{rest}", deep) for rest, deep in paths(inner)]
    return found


@given(st.dictionaries(KEYS, NESTED, max_size=4))
def test_every_path_is_found(values: dict[str, Any]) -> None:
    for path, value in paths(values):
        assert read_path(values, path, "columns.output") is value


@given(st.dictionaries(KEYS, NESTED, min_size=1, max_size=4), st.data())
def test_error_of_a_broken_path_names_its_deepest_existing_part(
    values: dict[str, Any], data: st.DataObject
) -> None:
    path, value = data.draw(st.sampled_from(paths(values)))
    with pytest.raises(MissingColumnError) as caught:
        read_path(values, f"{path}.no such step.x", "columns.output")
    assert f"missing '{path}.no such step'; '{path}' " in str(caught.value)
    assert str(caught.value).endswith("(columns.output)")
    assert caught.value.columns == tuple(values)
    assert isinstance(value, (dict, list)) or "which has no fields" in str(caught.value)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("mata.q", "missing 'mata'; found ['meta', 'list']; did you mean 'meta'?"),
        ("meta.qestion", "'meta' has ['question', 'empty']; did you mean 'question'?"),
        ("list.2.a", "missing 'list.2'; 'list' is a list of 2: give a number, counted from 0"),
        ("list.-1", "missing 'list.-1'; 'list' is a list of 2"),
        ("list.1.a", "missing 'list.1.a'; 'list.1' is int 7, which has no fields"),
        ("meta.empty.x", "missing 'meta.empty.x'; 'meta.empty' is null, which has no fields"),
    ],
)
def test_problems_of_a_path(path: str, expected: str) -> None:
    values = {"meta": {"question": "q", "empty": None}, "list": [{"a": 1}, 7]}
    with pytest.raises(MissingColumnError) as caught:
        read_path(values, path, "columns.output")
    assert expected in str(caught.value)


def test_column_with_a_dot_in_its_name_takes_precedence_over_a_path() -> None:
    assert read_path({"a.b": 1, "a": {"b": 2}}, "a.b", "") == 1


@given(st.text())
def test_control_characters_are_an_error_with_their_position(text: str) -> None:
    bad = [(i, c) for i, c in enumerate(text) if ord(c) < 32 and c not in "\t\n\r\f"]
    if not bad:
        assert check_text(text, "output") == text
        return
    place, character = bad[0]
    with pytest.raises(RowError) as caught:
        check_text(text, "output")
    expected = (
        f"output has a control character, {character!r}, at character {place + 1}; remove it, "
    )
    assert str(caught.value) == expected + "or set such rows aside with data.on_bad_row=quarantine"


@given(st.text(), st.characters(categories=["Cs"]), st.text())
def test_unpaired_surrogate_is_an_error_with_its_position(
    before: str, surrogate: str, after: str
) -> None:
    with pytest.raises(RowError, match=f"an unpaired surrogate.* at character {len(before) + 1}"):
        check_text(before + surrogate + after, "output")


@given(st.floats() | st.integers())
def test_a_weight_must_be_finite_and_not_negative(value: float) -> None:
    try:
        weight = read_weight(value, "weight")
    except RowError:
        assert not 0 <= value <= 3.4e38
    else:
        assert math.isfinite(weight) and weight == float(value) >= 0


@pytest.mark.parametrize("value", ["1", None, [1], {}])
def test_a_weight_must_be_a_number(value: Any) -> None:
    with pytest.raises(RowError, match="a weight is a number from 0 up"):
        read_weight(value, "weight")


def test_read_json_and_its_errors() -> None:
    assert read_json('{"a": [1]}', "x") == {"a": [1]}
    with pytest.raises(RowError, match=r"x is not JSON: Expecting value at character 7 of '\{"):
        read_json('{"a": }', "x")
    with pytest.raises(RowError, match="cannot be read as JSON"):
        read_json("[" * 200_000, "x")
    with pytest.raises(RowError, match="cannot be read as JSON: Exceeds the limit"):
        read_json("9" * 5000, "x")


@pytest.mark.parametrize("value", [{"a": math.nan}, {"a": b"x"}, {"a": "\ud800"}, {"a": {1, 2}}])
def test_values_that_json_cannot_hold_are_an_error(value: Any) -> None:
    with pytest.raises(RowError, match="x cannot be written as JSON"):
        check_json(value, "x")
    check_json({"a": [1, "é", None, 0.5]}, "x")
