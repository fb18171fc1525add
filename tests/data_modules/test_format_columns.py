"""What is suggested for a row of no known format, and that it reads the row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from data_modules.format import convert_row
from data_modules.format.fields import read_path, suggest_settings
from data_modules.format.format import format_of
from data_modules.messages import Origin
from data_modules.types import Conversation, Row

TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
SQUAD = {"id": "7", "context": "c", "question": "q", "answers": {"text": ["a"], "start": [1]}}


def read(values: dict[str, Any]) -> list[str]:
    """Return the texts that the suggested settings read."""
    assert format_of(values) is None
    found = yaml.safe_load("{" + suggest_settings(values) + "}")
    (item,) = convert_row(Row(values, Origin("d.json", 1)), found["format"], found["columns"])
    if isinstance(item, Conversation):
        return [turn.content for turn in item.turns]
    return [segment.text for segment in item.segments]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ({"question": "q", "answer": "a"}, ["q", "a"]),
        ({"Question": "q", "Response": "a", "id": "7"}, ["q", "a"]),
        ({"input": "q", "output": "a"}, ["q", "a"]),
        ({"input": "q", "target": "a"}, ["q", "a"]),
        ({"question": "q", "context": "c", "answers": ["a", "b"]}, ["q\n\nc", "a"]),
        (SQUAD, ["q\n\nc", "a"]),
        ({"instruction": "q", "instances": [{"input": "c", "output": "a"}]}, ["q\n\nc", "a"]),
        ({"id": 1, "dialog": TURNS}, ["q", "a"]),
        ({"id": 1, "body": "once", "title": "t"}, ["once"]),
        ({"line": "once"}, ["once"]),
    ],
)
def test_what_is_suggested_reads_the_row(values: dict[str, Any], texts: list[str]) -> None:
    assert read(values) == texts


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"a": 1},
        {"title": "t", "name": "n"},
        {"question": "q", "score": 1},
        {"prompt": "p", "chosen": "c", "rejected": "r"},
        {"question": "q", "answer": None},
    ],
)
def test_nothing_is_suggested_where_nothing_is_known(values: dict[str, Any]) -> None:
    assert suggest_settings(values) == ""


NAMES = st.sampled_from(["question", "input", "answers", "output", "instances", "text", "id"])
VALUES = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(NAMES, VALUES, max_size=5))
def test_every_column_suggested_is_there(values: dict[str, Any]) -> None:
    found = yaml.safe_load("{" + suggest_settings(values) + "}")
    for path in found.get("columns", {}).values():
        assert isinstance(read_path(values, path, ""), str)


def test_the_seed_tasks_are_read() -> None:
    file = Path(__file__).parents[2] / ".." / "shared/data/instruct/self_instruct_seed_tasks.jsonl"
    if not file.is_file():
        pytest.skip("the shared data is not here")
    values = json.loads(file.read_text().splitlines()[0])
    assert read(values)[-1] == values["instances"][0]["output"]
