"""Rows with their places, and what a person is told about a file that cannot be read."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest

from data_modules.source import Budget, find_files, fingerprint, is_hub_id, read_rows
from data_modules.types import DataError, Row


def rows_of(file: Path, content: str | bytes) -> list[Row]:
    """Write `content` to `file` and read its rows."""
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return list(read_rows(str(file)))


def problems_of(file: Path, content: str | bytes) -> list[str]:
    """Return the problems of reading `content`, without the folder's name."""
    with pytest.raises(DataError) as caught:
        rows_of(file, content)
    return [problem.replace(f"{file.parent}/", "") for problem in caught.value.problems]


def places(rows: list[Row]) -> list[tuple[int, object]]:
    """Return line and value `a` of each row."""
    return [(row.origin.line, row.values["a"]) for row in rows]


def test_json_array_rows_know_the_line_where_they_start(tmp_path: Path) -> None:
    text = '[\n  {"a": 1},\n  {\n    "a": "x\\ny"\n  }, {"a": 3}\n]\n'
    assert places(rows_of(tmp_path / "d.json", text)) == [(2, 1), (3, "x\ny"), (5, 3)]


def test_rows_of_an_array_on_one_line_are_counted(tmp_path: Path) -> None:
    assert places(rows_of(tmp_path / "d.json", '[{"a": 1}, {"a": 2}]\n')) == [(1, 1), (2, 2)]
    assert problems_of(tmp_path / "e.json", '[{"a": 1}, 2]')[0].startswith("e.json:2 is a number")


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_json_lines_with_mark_and_blank_lines(tmp_path: Path, suffix: str) -> None:
    text = "\ufeff" + '{"a": 1}\n\n  \n{"a": 2}'
    assert places(rows_of(tmp_path / f"d{suffix}", text)) == [(1, 1), (4, 2)]


def test_csv_cells_may_hold_newlines(tmp_path: Path) -> None:
    text = 'a,b\n"x\ny",2\n\nz,3\n'
    assert places(rows_of(tmp_path / "d.csv", text)) == [(2, "x\ny"), (5, "z")]


def test_parquet_rows_count_from_one(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    file = tmp_path / "d.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"a": [1, 2]}), file)
    assert places(list(read_rows(str(file)))) == [(1, 1), (2, 2)]


def test_gzip(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "d.jsonl.gz", gzip.compress(b'{"a": 1}\n'))
    assert places(rows) == [(1, 1)]
    assert "is not gzip" in problems_of(tmp_path / "e.jsonl.gz", '{"a": 1}')[0]
    assert "is gzip-compressed" in problems_of(tmp_path / "e.jsonl", gzip.compress(b"{}"))[0]


def test_all_broken_lines_are_told_and_the_good_ones_read(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    text = '{"a": 1}\n{"a": }\n{"a": 3}\n[1]\n{"a": 4, "a": 5}\n'
    assert problems_of(file, text) == [
        'd.jsonl:2:7 invalid JSON: Expecting value, near `{"a": }`',
        'd.jsonl:4 is a list, not an object; a row is {"column": value, ...}',
        "d.jsonl:5 key 'a' occurs twice; keep one of them",
    ]
    rows = []
    with pytest.raises(DataError):
        for row in read_rows(str(file)):
            rows.append(row)
    assert places(rows) == [(1, 1), (3, 3)]


def test_more_than_twenty_problems_are_counted(tmp_path: Path) -> None:
    problems = problems_of(tmp_path / "d.jsonl", "{\n" * 50)
    assert len(problems) == 20
    assert problems[-1] == "... and 31 more like these"


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("d.jsonl", '{"a": 1}\n{"a": "tw', "d.jsonl:2 line is cut off (no newline)"),
        ("d.jsonl", '{"a": 1}\n{"a": }', "d.jsonl:2:7 invalid JSON: Expecting value"),
        ("d.json", '[\n{"a": 1},\n{"a": }\n]', "d.json:3:7 invalid JSON: Expecting value"),
        ("d.json", '[{"a": 1} {"a": 2}]', "d.json:1:11 invalid JSON: Expecting ',' or ']'"),
        ("d.json", '[{"a": 1},', "d.json:1:11 invalid JSON"),
        ("d.json", '[{"a": 1},\n', "d.json:2:1 invalid JSON"),
        ("d.json", '[\n{"a": 1, "a": 2}]', "d.json:2 key 'a' occurs twice"),
        ("d.json", "[1]", "d.json:1 is a number, not an object"),
        ("d.json", "", "d.json: 0 rows"),
        ("d.json", "[]", "d.json: 0 rows"),
        ("d.jsonl", "\n \n", "d.jsonl: 0 rows"),
        ("d.csv", "a,b\n", "d.csv: 0 rows"),
        (
            "d.jsonl",
            b'{"a": 1}\n{"a": "caf\xe9"}\n',
            "d.jsonl:2 byte 0xE9 at column 11 is not UTF-8",
        ),
        (
            "d.json",
            b'[{"a": 1},\n{"a": "caf\xe9"}]',
            "d.json:2 byte 0xE9 at column 11 is not UTF-8",
        ),
        ("d.jsonl", '{"a": 1}'.encode("utf-16"), "d.jsonl: is UTF-16; save it as UTF-8"),
        ("d.csv", "a,b\n1,2,3\n", "d.csv:2 3 cells, the header has 2 (a, b)"),
        ("d.csv", 'a,b\n"1,2\n', "d.csv:2 broken CSV"),
        ("d.parquet", "PAR0", "d.parquet: is no parquet file"),
        ("d.txt", "text", "d.txt: cannot read .txt; use .json, .jsonl, .csv, .parquet"),
    ],
)
def test_what_is_told_about_a_broken_file(
    tmp_path: Path, name: str, content: str | bytes, told: str
) -> None:
    problems = problems_of(tmp_path / name, content)
    assert problems[0].startswith(told)


def test_object_with_rows_inside_names_the_place(tmp_path: Path) -> None:
    problems = problems_of(tmp_path / "d.json", json.dumps({"data": [{"a": 1}]}, indent=1))
    assert problems[0].startswith("d.json: holds one object over several lines; give an array")


def test_missing_file_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r"no such file .*did you mean .*train.jsonl"):
        find_files(str(tmp_path / "trian.jsonl"))
    with pytest.raises(DataError, match="no such file"):
        find_files(str(tmp_path / "no" / "where" / "trian.jsonl"))


def test_folder_and_glob(tmp_path: Path) -> None:
    for name in ("train-1.jsonl", "train-0.jsonl", "test.jsonl", "notes.md"):
        (tmp_path / name).write_text(json.dumps({"a": name}) + "\n")
    names = [row.values["a"] for row in read_rows(str(tmp_path))]
    assert names == ["train-0.jsonl", "train-1.jsonl"]
    assert [f.name for f in find_files(str(tmp_path), "test")] == ["test.jsonl"]
    assert [f.name for f in find_files(str(tmp_path / "t*.jsonl"))] == [
        "test.jsonl",
        "train-0.jsonl",
        "train-1.jsonl",
    ]
    with pytest.raises(DataError, match=r"no data file for split 'dev'.*found notes.md"):
        find_files(str(tmp_path), "dev")
    with pytest.raises(DataError, match="no file matches"):
        find_files(str(tmp_path / "*.csv"))


def test_folder_without_split_names_is_read_whole(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.json"):
        (tmp_path / name).write_text('{"a": 1}\n')
    assert [f.name for f in find_files(str(tmp_path))] == ["a.json", "b.jsonl"]


@pytest.mark.parametrize(
    ("path", "is_id"),
    [("databricks/dolly-15k", True), ("data/rows.json", False), ("rows", False), ("./a/b", False)],
)
def test_what_is_a_hub_id(path: str, is_id: bool) -> None:
    assert is_hub_id(path) is is_id


def test_folder_that_exists_is_no_hub_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    assert not is_hub_id("data/rows")


def test_fingerprint_follows_the_bytes(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    rows_of(file, '{"a": 1}\n')
    before = fingerprint(str(file))
    assert before == fingerprint(str(file)) and len(before) == 64
    rows_of(file, '{"a": 2}\n')
    assert fingerprint(str(file)) != before


def test_check_reads_the_beginning_only(tmp_path: Path) -> None:
    for name, content in (
        ("d.json", json.dumps([{"a": "x" * 100}] * 100)),
        ("d.jsonl", (json.dumps({"a": "x" * 100}) + "\n") * 100),
        ("d.csv", "a,b\n" + f"{'x' * 100},1\n" * 100),
    ):
        file = tmp_path / name
        file.write_text(content)
        assert 5 < len(list(read_rows(str(file), budget=Budget(1000)))) < 15


def test_budget_is_that_of_all_files_together(tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / f"{name}.jsonl").write_text((json.dumps({"a": "x" * 92}) + "\n") * 10)
    (tmp_path / "e.jsonl").write_text("never read")
    assert len(list(read_rows(str(tmp_path), budget=Budget(2500)))) in (24, 25)


def test_file_whose_first_row_exceeds_the_budget_is_not_called_empty(tmp_path: Path) -> None:
    file = tmp_path / "d.json"
    file.write_text(json.dumps([{"a": "x" * 900}]))
    assert list(read_rows(str(file), budget=Budget(100))) == []


def test_array_on_one_long_line_is_not_read_to_see_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "d.json"
    file.write_text(json.dumps([{"a": "x" * 100}] * 50_000))
    num_bytes = 0

    class Counted(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            nonlocal num_bytes
            count = super().readinto(buffer) or 0
            num_bytes += count
            return count

    monkeypatch.setattr("data_modules.source._open", lambda path: io.BufferedReader(Counted(path)))
    assert 50 < len(list(read_rows(str(file), budget=Budget(10_000)))) < 100
    assert num_bytes < 200_000


def test_control_characters_of_a_file_never_reach_the_terminal(tmp_path: Path) -> None:
    escape = "\x1b]0;owned\x07"
    for name, content in (
        ("a.jsonl", f'{{"a": {escape}}}\n'),
        ("b.csv", f"a{escape},b\n1,2,3\n"),
        ("c.jsonl", json.dumps({"k": 1})[:-1] + ', "\\u001b[2J": 1, "\\u001b[2J": 2}\n'),
    ):
        problem = problems_of(tmp_path / name, content)[0]
        assert problem.isprintable() and "\\x1b" in problem
    problem = problems_of(tmp_path / "d.csv", ",".join(["column"] * 999) + "\n1\n")[0]
    assert len(problem) < 250


def test_samples_that_ship() -> None:
    row = next(read_rows("sample:list_corpus"))
    assert row.origin.line == 1 and row.values["segments"]
    assert len(fingerprint("sample:list_corpus")) == 64
    with pytest.raises(DataError, match=r"no such sample; there are .*list_corpus"):
        find_files("sample:skills")
