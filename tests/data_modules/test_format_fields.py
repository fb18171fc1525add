"""Single values of a row, and the suggestion if no format is recognized."""

from __future__ import annotations

import math
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from common.errors import Origin
from data_modules.format import convert_row, format_of, suggest_settings
from data_modules.format.fields import (
    MissingColumnError,
    RowError,
    check_json,
    check_text,
    read_json,
    read_path,
    read_weight,
)
from data_modules.types import Conversation, Row

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


TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
SQUAD = {"id": "7", "context": "c", "question": "q", "answers": {"text": ["a"], "start": [1]}}


def read(values: dict[str, Any]) -> list[str]:
    assert format_of(values) is None
    found = yaml.safe_load("{" + suggest_settings(values) + "}")
    (item,) = convert_row(Row(values, Origin("d.json", 1)), found["format"], found["columns"])
    if isinstance(item, Conversation):
        return [turn.content for turn in item.turns]
    return [segment.text for segment in item.segments]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ({"question": "q", "reply": "a"}, ["q", "a"]),
        ({"question": "q", "context": "c", "answers": ["a", "b"]}, ["q\n\nc", "a"]),
        (SQUAD, ["q\n\nc", "a"]),
        ({"instruction": "q", "instances": [{"input": "c", "output": "a"}]}, ["q\n\nc", "a"]),
        ({"id": 1, "dialog": TURNS}, ["q", "a"]),
        ({"line": "once"}, ["once"]),
    ],
)
def test_the_suggested_settings_read_the_row(values: dict[str, Any], texts: list[str]) -> None:
    assert read(values) == texts


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"question": "q", "score": 1},
        {"prompt": "p", "chosen": "c", "rejected": "r"},
        {"question": "q", "answer": None},
    ],
)
def test_no_suggestion_without_a_known_column(values: dict[str, Any]) -> None:
    assert suggest_settings(values) == ""


NAMES = st.sampled_from(["question", "input", "answers", "output", "instances", "text", "id"])
VALUES = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(NAMES, VALUES, max_size=5))
def test_every_suggested_column_exists(values: dict[str, Any]) -> None:
    found = yaml.safe_load("{" + suggest_settings(values) + "}")
    for path in found.get("columns", {}).values():
        assert isinstance(read_path(values, path, ""), str)
