"""Structs of parquet and arrow come back as they were written: without the fields of other rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import Origin
from data_modules.format import convert_row
from data_modules.source import read_chunks
from data_modules.source.hub import _stream
from data_modules.source.locating import check_split
from data_modules.types import Conversation, Row


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a row with one tool and a call of it."""
    kinds = {key: {"type": type(value).__name__} for key, value in arguments.items()}
    function = {"name": name, "parameters": {"type": "object", "properties": kinds}}
    calling = {
        "role": "assistant",
        "tool_calls": [{"function": {"name": name, "arguments": arguments}}],
    }
    return {
        "messages": [{"role": "user", "content": "q"}, calling],
        "tools": [{"function": function}],
    }


ROWS = [
    call("weather", {"city": "Oslo", "where": {"country": "no"}}),
    call("add", {"numbers": [{"a": 1}, {"b": 2}]}),
    call("now", {}),
]


def write(rows: list[dict[str, Any]], file: Path) -> Path:
    """Write rows as a file of the kind that its name says."""
    if file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return file
    table = pyarrow.Table.from_pylist(rows)
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(table, file)
    else:
        make = pyarrow.ipc.new_file if file.stem == "file" else pyarrow.ipc.new_stream
        with make(str(file), table.schema) as writer:
            writer.write_table(table)
    return file


def read(file: Path, **options: Any) -> list[dict[str, Any]]:
    """Return the values of all rows of a file."""
    rows = [row for chunk in read_chunks(str(file), **options) for row in chunk.rows()]
    assert all(isinstance(row, Row) for row in rows), rows
    return [row.values for row in rows if isinstance(row, Row)]


@pytest.mark.parametrize("name", ["d.parquet", "file.arrow", "stream.arrow", "d.jsonl"])
def test_a_call_has_its_own_arguments_only(name: str, tmp_path: Path) -> None:
    assert read(write(ROWS, tmp_path / name)) == ROWS


def test_jsonl_keeps_its_nulls(tmp_path: Path) -> None:
    rows = [call("weather", {"city": None, "where": {"country": None}})]
    assert read(write(rows, tmp_path / "d.jsonl")) == rows


def test_a_field_that_is_null_in_a_row_can_still_be_named_as_its_column(tmp_path: Path) -> None:
    rows = [{"m": {"q": "q", "extra": "e"}, "a": "a"}, {"m": {"q": "q", "extra": None}, "a": "a"}]
    columns = {"instruction": "m.q", "input": "m.extra", "output": "a"}
    asked = []
    for values in read(write(rows, tmp_path / "d.parquet")):
        (item,) = convert_row(Row(values, Origin("d.parquet", 1)), "alpaca", columns)
        assert isinstance(item, Conversation)
        asked.append(item.turns[0].content)
    assert asked == ["q\n\ne", "q"]


KEYS = st.sampled_from(["a", "b", "c"])
LEAVES = st.integers(0, 9) | st.just(None)
OBJECTS = st.dictionaries(
    KEYS,
    st.dictionaries(
        KEYS, st.lists(st.dictionaries(KEYS, LEAVES, max_size=2), max_size=2), max_size=2
    ),
    max_size=3,
)


def without_nulls(value: Any) -> Any:
    """Return a value without the fields that are null."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


@given(st.lists(OBJECTS, min_size=1, max_size=4))
def test_objects_of_any_depth_come_back(
    tmp_path_factory: pytest.TempPathFactory, objects: list[dict[str, Any]]
) -> None:
    rows = [{"n": 1, "x": one, "text": None} for one in objects]
    try:
        file = write(rows, tmp_path_factory.mktemp("d") / "d.parquet")
    except (pyarrow.ArrowException, NotImplementedError):
        return  # a struct without any field
    assert read(file) == [{**row, "x": without_nulls(row["x"])} for row in rows]


def test_nulls_of_a_list_and_of_json_text_stay(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "m": datasets.List(
                {"role": datasets.Value("string"), "name": datasets.Value("string")}
            ),
            "tools": datasets.List(datasets.Json()),
            "numbers": datasets.List(datasets.Value("int64")),
            "text": datasets.Value("string"),
        }
    )
    rows = [
        {"m": [{"role": "user"}], "tools": [{"default": None}], "numbers": [1, None], "text": None},
        {
            "m": [{"role": "tool", "name": "f"}],
            "tools": [{"x": {"y": None}}],
            "numbers": [],
            "text": "t",
        },
    ]
    file = tmp_path / "d.parquet"
    datasets.Dataset.from_list(rows, features=features).to_parquet(str(file))
    assert read(file) == rows
    # Rows of a hub data set, while they are downloaded.
    loaded = datasets.load_dataset(
        "parquet", data_files=str(file), split="train", streaming=True, features=features
    )
    (part,) = check_split("train")
    streamed = [
        row for chunk in _stream("o/n", part, loaded, (0, 1), 1 << 20) for row in chunk.rows()
    ]
    assert [row.values for row in streamed if isinstance(row, Row)] == rows
