"""Reading the rows of one file: every format, compressed, in chunks, and damaged."""

from __future__ import annotations

import gzip
import json
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import DataError
from data_modules.source import opening
from data_modules.source.opening import BadRow, Budget, Chunk, ReadOptions
from data_modules.source.source import count_rows, read_file
from data_modules.types import Conversation, Row
from tests.data_modules.conftest import arrow_bytes, items_of, lines_of, parquet_bytes, zst

ROWS = [{"a": "first"}, {"a": "a second, with é"}, {"a": "third"}]


CONTENTS = {
    "d.json": json.dumps(ROWS, ensure_ascii=False).encode(),
    "d.jsonl": lines_of(ROWS),
    "d.ndjson": lines_of(ROWS),
    "d.csv": 'a\nfirst\n"a second, with é"\nthird\n'.encode(),
    "d.tsv": "a\nfirst\na second, with é\nthird\n".encode(),
    "d.parquet": parquet_bytes(ROWS),
    "d.arrow": arrow_bytes(ROWS, pyarrow.ipc.new_file),
    "stream.arrow": arrow_bytes(ROWS, pyarrow.ipc.new_stream),
}


def read(file: Path, **settings: Any) -> list[Row | BadRow]:
    rows: list[Row | BadRow] = []
    for chunk in read_file(file, ReadOptions(**settings)):
        sent: Chunk = pickle.loads(pickle.dumps(chunk))  # noqa: S301
        found = list(sent.rows())
        assert sent.count() == len(found)
        rows += found
    return rows


def problems_of(file: Path, content: bytes, **settings: Any) -> list[str]:
    file.write_bytes(content)
    problems = []
    try:
        for chunk in read_file(file, ReadOptions(**settings)):
            problems += [row.problem for row in chunk.rows() if isinstance(row, BadRow)]
    except DataError as error:
        problems += error.problems
    return [problem.replace(f"{file.parent}/", "") for problem in problems]


ROW = b'\n{"a": "fourth"}\n'
PACKED: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("", bytes),
    (".gz", gzip.compress),
    (".zst", zst),
]


@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize(("suffix", "pack"), PACKED)
def test_every_format_is_read_plain_and_compressed(
    tmp_path: Path, name: str, suffix: str, pack: Callable[[bytes], bytes]
) -> None:
    file = tmp_path / f"{name}{suffix}"
    file.write_bytes(pack(CONTENTS[name]))
    rows = read(file)
    assert [row.values for row in rows if isinstance(row, Row)] == ROWS
    first = 2 if name in ("d.csv", "d.tsv") else 1
    assert [row.origin.line for row in rows] == [first, first + 1, first + 2]
    assert {row.origin.file for row in rows} == {str(file)}
    budget = Budget(1)
    assert count_rows(file, ReadOptions(budget=budget)) == 3 and budget.left == 1


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("d.json", '[\n {"a": 1},\n {\n  "a": "x"\n }, {"a": 3}\n]\n', [(2, 1), (3, "x"), (5, 3)]),
        ("d.json", '[{"a": 1}, {"a": 2}]\n', [(1, 1), (2, 2)]),
        ("d.json", '\ufeff{"a": 1}\n\n  \n{"a": 2}', [(1, 1), (4, 2)]),
        ("d.jsonl", '\ufeff{"a": 1}\n\n  \n{"a": 2}', [(1, 1), (4, 2)]),
        ("d.csv", 'a,b\n"x\ny",2\n\nz,3\n', [(2, "x\ny"), (5, "z")]),
    ],
)
def test_rows_have_their_line_number(
    tmp_path: Path, name: str, text: str, expected: list[tuple[int, object]]
) -> None:
    (tmp_path / name).write_text(text)
    rows = [row for row in read(tmp_path / name) if isinstance(row, Row)]
    assert [(row.origin.line, row.values["a"]) for row in rows] == expected


@pytest.mark.parametrize("mark", [",", ";", "\t", "|"])
def test_the_separator_of_a_table_is_that_of_its_header(tmp_path: Path, mark: str) -> None:
    for name in ("d.csv", "d.tsv"):
        for head in ("a{}b", '\n"a"{}"b"'):
            file = tmp_path / name
            cell = '"; , | "'
            file.write_text(f"{head.format(mark)}\n{cell}{mark}2\n3{mark}")
            (first, second) = read(file)
            assert isinstance(first, Row) and first.values == {"a": "; , | ", "b": "2"}
            assert isinstance(second, Row) and second.values == {"a": "3", "b": ""}
            assert second.origin.line == head.count("\n") + 3
    file.write_text('"a; b, c"\nfirst; second\n')
    (row,) = read(file)
    assert isinstance(row, Row) and row.values == {"a; b, c": "first; second"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.json.gz", zst(b'[{"a": 1}]'), "d.json.gz: is zstd-compressed; name it .zst"),
        ("d.csv.zst", zst(b"a\n1\n" * 99)[:-6], "d.csv.zst: cannot be read: Truncated"),
        ("d.csv", CONTENTS["d.arrow"], "d.csv: is an arrow file; name it .arrow"),
        ("d.jsonl", '{"a": 1}'.encode("utf-16-le"), "d.jsonl: is UTF-16; save it as UTF-8"),
        ("d.csv", b"a,b\r1,2\r", "d.csv: has CR line endings; save it with LF"),
        (
            "d.csv",
            b"a;b\n1\n",
            "d.csv:2 1 cells, the header has 2 (a, b); quote cells that hold a semi",
        ),
        ("d.csv", b'a,b\n"x\n\xe9",2\n', "d.csv:3 byte 0xE9 at column 1 is not UTF-8"),
        ("d.csv", b"a,b\n1,2\na,b\n3,4\n", "d.csv:3 repeats the header"),
        ("d.csv", b"a,b,a\n1,2,3\n", "d.csv:1 column 'a' is twice in the header (a, b, a)"),
        ("d.csv", b"a\x1b]0;owned\x07,b\n1\n", "d.csv:2 1 cells, the header has 2 (a\\x1b]0;owned"),
        (
            "d.jsonl",
            b'{"a": \x1b]0;owned\x07}\n',
            "d.jsonl:1:7 invalid JSON: Expecting value, near",
        ),
        ("d.jsonl", b'{"\\u001b[2J": 1, "\\u001b[2J": 2}\n', "d.jsonl:1 key '\\x1b[2J' occurs tw"),
        ("d.txt", b"one\ntwo\n\nthr\xe9e\n", "d.txt:4 byte 0xE9 at column 4 is not UTF-8"),
        ("d.arrow", b"ARROW1\0\0nonsense", "d.arrow: not a readable arrow file"),
        ("d.json", b'[{"a": 1},\n{"a": "caf\xe9"}]', "d.json:2 byte 0xE9 at column 11 is not"),
        ("d.json", b'[{"a": 1},\n{"a": 2}\n, \n]\n', "d.json:3:1 invalid JSON: trailing comma"),
        ("d.json", b'[{"a": 1}]\n\n[{"a": 2}]\n', "d.json:3:1 more than one JSON value"),
        ("d.json", b'[{"a": 1}]\xef\xbb\xbf[{"a": 2}]', "d.json:1:11 more than one JSON value"),
    ],
)
def test_content_that_does_not_match_the_file_name_is_reported(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    problem = problems_of(tmp_path / name, content)[0]
    assert problem.startswith(message) and problem.isprintable()


def test_the_name_of_a_single_column_may_be_a_value(tmp_path: Path) -> None:
    assert problems_of(tmp_path / "one.csv", b"a\n1\na\n") == []


@pytest.mark.parametrize("name", ["d.jsonl", "d.parquet", "d.arrow", "stream.arrow"])
def test_a_truncated_file_is_refused(tmp_path: Path, name: str) -> None:
    assert problems_of(tmp_path / name, CONTENTS[name][:-7])


def test_indexes_and_dictionaries_are_not_taken_for_a_second_file(tmp_path: Path) -> None:
    rows = [{"a": f"word {number % 7}", "b": [number]} for number in range(500)]
    table = pyarrow.Table.from_pylist(rows)
    coded = table.set_column(0, "a", table["a"].dictionary_encode())
    file = tmp_path / "d.parquet"
    pyarrow.parquet.write_table(table, file, write_page_index=True, row_group_size=100)
    assert len(read(file)) == 500
    for new in (pyarrow.ipc.new_file, pyarrow.ipc.new_stream):
        for how in (None, "zstd"):
            options = pyarrow.ipc.IpcWriteOptions(compression=how)
            with new(tmp_path / "d.arrow", coded.schema, options=options) as writer:
                writer.write_table(coded, max_chunksize=70)
            assert len(read(tmp_path / "d.arrow")) == 500


@pytest.mark.parametrize("name", CONTENTS)
def test_what_follows_the_rows_of_a_file_is_read_or_refused(tmp_path: Path, name: str) -> None:
    for number, tail in enumerate((CONTENTS[name], b"\0" * 16, b"<html>", ROW)):
        suffix, pack = PACKED[(list(CONTENTS).index(name) + number) % 3]
        file = tmp_path / f"{name}{suffix}"
        problems = problems_of(file, pack(CONTENTS[name]) + pack(tail))  # packed: two frames
        assert problems or len(read(file)) == len(ROWS) * (1 if number else 2) + (
            name.endswith("sv") or tail == ROW
        )
        if name == "d.json":
            assert "more than one JSON value; name it .jsonl or join them" in problems[0]


def test_bad_rows_keep_their_position_reason_and_text(tmp_path: Path) -> None:
    problems = problems_of(tmp_path / "d.json", b'[{"a": 1, "a": 2},\n3,\n{"a": 3},\n{"a": }, 5]')
    assert [problem.split(" ")[0] for problem in problems] == ["d.json:1", "d.json:2", "d.json:4:7"]
    file = tmp_path / "d.jsonl"
    file.write_text('{"a": ' + "x" * 5000 + "\n")
    (row,) = read(file)
    assert isinstance(row, BadRow) and len(row.raw) == 2000
    file.write_bytes(b'{"a": 1}\n{"a": }\n{"b": "\xe9"}\n{"a": 4}\n')
    good, broken, latin, last = read(file)
    assert isinstance(good, Row) and isinstance(last, Row) and last.origin.line == 4
    assert isinstance(broken, BadRow) and isinstance(latin, BadRow)
    assert broken.raw == '{"a": }' and broken.reason.startswith("invalid JSON: Expecting value")
    assert broken.problem == f"{file}:2:7 {broken.reason}"
    assert latin.problem == f"{file}:3 {latin.reason}" and latin.raw == '{"b": "\ufffd"}'


BLANK_LINES = st.sampled_from(["", " ", "\t", "\r"])
TEXT_LINES = st.text(st.sampled_from("ab é\x1c\u2028\x85"), min_size=1, max_size=6)


@given(st.lists(st.one_of(TEXT_LINES, BLANK_LINES), max_size=30), st.integers(1, 40), st.booleans())
def test_lines_do_not_depend_on_chunk_borders(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], size: int, ends: bool
) -> None:
    texts = [line if not line.strip(" \t\r") else json.dumps({"a": line}) for line in lines]
    file = tmp_path_factory.mktemp("lines") / "d.jsonl"
    file.write_bytes(("\n".join(texts) + "\n" * ends).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "CHUNK_BYTES", size)
        rows = read(file)
    assert [(row.origin.line, row.values["a"]) for row in rows if isinstance(row, Row)] == [
        (number, line) for number, line in enumerate(lines, 1) if line.strip(" \t\r")
    ]
    assert count_rows(file, ReadOptions()) == len(rows)


def paragraphs(lines: list[str]) -> list[tuple[int, str]]:
    """Return first line and text of each paragraph, the plain way."""
    found: list[tuple[int, list[str]]] = []
    before = True
    for number, line in enumerate(lines, 1):
        blank = not line.strip(" \t\r")
        if not blank and before:
            found.append((number, []))
        if not blank:
            found[-1][1].append(line)
        before = blank
    return [(number, "\n".join(part)) for number, part in found]


@given(st.lists(st.one_of(TEXT_LINES, BLANK_LINES), max_size=30), st.integers(1, 40))
def test_paragraphs_do_not_depend_on_chunk_borders(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], size: int
) -> None:
    lines = [line if line.strip() else line.strip("\x1c\u2028\x85") for line in lines]
    lines = ["first", "", "second", *lines]
    file = tmp_path_factory.mktemp("text") / "d.txt"
    file.write_bytes("\n".join(lines).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "CHUNK_BYTES", size)
        rows = read(file)
    found = [(row.origin.line, row.values["text"]) for row in rows if isinstance(row, Row)]
    assert found == paragraphs(lines)
    # Text without blank lines has a row per line.
    file.write_bytes(b"\n\none\r\n two\nthree\n\n")
    found = [(row.origin.line, row.values["text"]) for row in read(file) if isinstance(row, Row)]
    assert found == [(3, "one"), (4, " two"), (5, "three")]


def test_piece_of_a_batch_is_sent_without_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "d.arrow"
    rows = [{"a": f"{number}" + "x" * 200} for number in range(20_000)]
    file.write_bytes(arrow_bytes(rows, pyarrow.ipc.new_file))
    chunks = list(read_file(file, ReadOptions()))
    assert len(chunks) > 3
    assert max(len(pickle.dumps(chunk)) for chunk in chunks) < 2 << 20
    few = chunks[1].select(range(3, 10, 3))
    assert len(pickle.dumps(few)) < 5000
    first = chunks[0].count()
    assert [row.origin.line for row in few.rows()] == [first + 4, first + 7, first + 10]
    sent = pickle.loads(pickle.dumps(few))  # noqa: S301
    assert list(sent.rows()) == list(few.rows())
    assert next(iter(few.rows())).values["a"].startswith(str(first + 3))


LARGE = "x" * 5000


@pytest.mark.parametrize("chunk_bytes", [64, 1 << 20])
def test_a_row_above_the_size_limit_is_a_bad_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(opening, "CHUNK_BYTES", chunk_bytes)
    rows = [{"a": "s"}, {"a": LARGE}, {"a": "t"}]
    for name, content, line, size in (
        ("d.jsonl", lines_of(rows), 2, "5,009"),
        ("d.json", json.dumps(rows).encode(), 2, "5,009"),
        ("d.txt", f"s\n\nx\n{LARGE}\n\nt\n".encode(), 3, "5,002"),
        ("d.txt", f"s\n{LARGE}\nt\n".encode(), 2, "5,000"),
        ("d.parquet", parquet_bytes(rows), 2, "5,0"),
        ("d.arrow", arrow_bytes(rows, pyarrow.ipc.new_file), 2, "5,0"),
    ):
        (problem,) = problems_of(tmp_path / name, content, max_row_bytes=1000)
        assert problem.startswith(f"{name}:{line} row of {size}")
        assert "data.max_row_bytes is 1,000" in problem
        _, bad, last = read(tmp_path / name, max_row_bytes=1000)
        assert isinstance(bad, BadRow) and isinstance(last, Row)
        assert last.values.get("a", last.values.get("text")) == "t"
        assert problems_of(tmp_path / name, content, max_row_bytes=10_000) == []


def test_the_size_limit_is_inclusive_and_in_bytes(tmp_path: Path) -> None:
    for name, content in (
        ("d.jsonl", '{"a": "éé"}\n'),
        ("d.json", '[{"a": "éé"}]'),
        ("d.txt", "éééé\n"),
        ("e.txt", "ééé\nx\n\nx"),
        ("d.csv", "a\nééé\n"),
    ):
        size = max(len(part.strip("[]\n").encode()) for part in content.split("\n\n"))
        size = 6 if name == "d.csv" else size
        data = content.encode()
        assert problems_of(tmp_path / name, data, max_row_bytes=size) == [], name
        assert len(problems_of(tmp_path / name, data, max_row_bytes=size - 3)) == 1, name
    content = f'a,b\n1,2\n"{"x" * 5000},2\n3,4\n'.encode()
    (problem,) = problems_of(tmp_path / "d.csv", content, max_row_bytes=1000)
    assert problem.startswith("d.csv:3 row of more than 1,000 bytes (data.max_row_bytes)")


def test_a_large_paragraph_does_not_depend_on_chunk_borders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "d.txt"
    file.write_bytes(b"s\n\n" + b"long\n" * 20 + b" \t\nt\n\nu")
    for chunk_bytes in range(1, 40, 4):
        monkeypatch.setattr(opening, "CHUNK_BYTES", chunk_bytes)
        rows = read(file, max_row_bytes=20)
        assert [row.origin.line for row in rows] == [1, 3, 24, 26]
        assert [isinstance(row, BadRow) for row in rows] == [False, True, False, False]


def peak_of(file: Path, **settings: Any) -> int:
    tracemalloc.start()
    for chunk in read_file(file, ReadOptions(**settings)):
        for _ in chunk.rows():
            pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_large_files_are_not_loaded_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "CHUNK_BYTES", 1 << 16)
    size, most = 4 << 20, 1 << 20
    line = b'{"a": "' + b"x" * 991 + b'"}\n'
    (tmp_path / "d.jsonl").write_bytes(line * (size // len(line)))
    (tmp_path / "d.csv").write_bytes(b"a,b\n" + (b"x" * 998 + b",1\n") * (size // 1000))
    (tmp_path / "d.txt").write_bytes((b"x" * 998 + b"\n\n") * (size // 1000))
    (tmp_path / "row.jsonl").write_bytes(b'{"a": "' + b"x" * size + b'"}\n{"a": 1}\n')
    for name in ("d.jsonl", "d.csv", "d.txt"):
        assert peak_of(tmp_path / name) < most, name
    assert peak_of(tmp_path / "row.jsonl", max_row_bytes=1 << 16) < most


def test_a_parquet_row_group_is_not_loaded_whole(tmp_path: Path) -> None:
    file = tmp_path / "d.parquet"
    table = pyarrow.table({"a": [f"{number:01000}" for number in range(30_000)]})
    settings = {"compression": "none", "use_dictionary": False}
    pyarrow.parquet.write_table(table, file, row_group_size=30_000, **settings)
    del table
    before = most = pyarrow.total_allocated_bytes()
    for _ in read_file(file, ReadOptions()):
        most = max(most, pyarrow.total_allocated_bytes())
    assert most - before < 12 << 20


def test_text_of_a_batch_that_is_not_utf8_is_a_bad_row(tmp_path: Path) -> None:
    values = pyarrow.array([b"good", b"caf\xe9", b"good too"], pyarrow.binary())
    column = pyarrow.StringArray.from_buffers(3, values.buffers()[1], values.buffers()[2])
    file = tmp_path / "d.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"n": [1, 2, 3], "a": column}), file)
    good, bad, last = read(file)
    assert isinstance(good, Row) and isinstance(last, Row) and last.origin.line == 3
    assert isinstance(bad, BadRow)
    assert bad.problem.startswith(f"{file}:2 column 'a' (string) cannot be read: 'utf-8' codec")


def test_the_budget_ends_reading_between_rows(tmp_path: Path) -> None:
    for name, content in CONTENTS.items():
        if name.endswith((".parquet", ".arrow")):
            continue
        file = tmp_path / name
        file.write_bytes(content)
        for left in range(len(content) + 1):
            rows = [
                row
                for chunk in read_file(file, ReadOptions(budget=Budget(left)))
                for row in chunk.rows()
            ]
            assert all(isinstance(row, Row) for row in rows), (name, left)
        assert len(rows) == 3


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
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


CALLS = [
    call("weather", {"city": "Oslo", "where": {"country": "no"}}),
    call("add", {"numbers": [{"a": 1}, {"b": 2}]}),
    call("now", {}),
]


def values_of(name: str, rows: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Write rows as a file of the kind that its name says; return their values as read."""
    pack = {"d.parquet": parquet_bytes, "d.jsonl": lines_of}.get(name)
    new = pyarrow.ipc.new_file if name == "file.arrow" else pyarrow.ipc.new_stream
    (folder / name).write_bytes(pack(rows) if pack else arrow_bytes(rows, new))
    found = read(folder / name)
    assert all(isinstance(row, Row) for row in found), found
    return [row.values for row in found if isinstance(row, Row)]


@pytest.mark.parametrize("name", ["d.parquet", "file.arrow", "stream.arrow", "d.jsonl"])
def test_a_call_has_its_own_arguments_only(name: str, tmp_path: Path) -> None:
    assert values_of(name, CALLS, tmp_path) == CALLS
    rows = [call("weather", {"city": None, "where": {"country": None}})]
    assert (values_of(name, rows, tmp_path) == rows) == (name == "d.jsonl")  # it keeps its nulls


def test_a_field_that_is_null_in_a_row_can_still_be_named_as_its_column(tmp_path: Path) -> None:
    rows = [{"m": {"q": "q", "extra": "e"}, "a": "a"}, {"m": {"q": "q", "extra": None}, "a": "a"}]
    columns = {"instruction": "m.q", "input": "m.extra", "output": "a"}
    asked = []
    for values in values_of("d.parquet", rows, tmp_path):
        (item,) = items_of(values, "alpaca", **columns)
        assert isinstance(item, Conversation)
        asked.append(item.turns[0].content)
    assert asked == ["q\n\ne", "q"]
