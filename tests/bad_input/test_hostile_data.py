"""Data files that would hang, fill or crash a run: refused at once, with file and setting."""

from __future__ import annotations

import gzip
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from common.errors import DataError
from data_modules import DataConfig, check_datasets, open_regular
from data_modules.source import ReadLimits, fingerprint, opening, read_chunks, tables
from tests.bad_input.prepared import named, prepare, problems_of, write
from tests.data_modules.conftest import zst

GOOD = {"instruction": "q", "output": "one"}
LINE = json.dumps(GOOD) + "\n"


def make_socket(file: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(file))


SPECIAL: dict[str, Callable[[Path], object]] = {
    "a named pipe": os.mkfifo,
    "a socket": make_socket,
    "a device": lambda file: file.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("what", SPECIAL)
def test_special_files_are_refused_at_once(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.jsonl").write_text(LINE)
    SPECIAL[what](Path("mine/b.jsonl"))
    started = time.monotonic()
    for typed in ("mine/b.jsonl", "mine", "mine/*.jsonl", "mine/b.json*"):
        (problem,) = check_datasets(DataConfig(datasets=[named(Path(typed))]))
        assert problem.startswith(f"mine/b.jsonl: is {what}, not a file; give a regular file")
    with pytest.raises(DataError, match="not a file"):
        fingerprint("mine/b.jsonl")
    assert time.monotonic() - started < 20


def test_a_folder_in_the_place_of_a_file_is_not_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(LINE)
    (tmp_path / "b.jsonl").mkdir()
    (problem,) = check_datasets(DataConfig(datasets=[named(tmp_path)]))
    assert problem == (
        f"{tmp_path}/b.jsonl: is a folder, not a file; give a regular file, or remove it from the "
        "data set"
    )
    (tmp_path / "b.jsonl").rmdir()
    (tmp_path / "b.jsonl").symlink_to("nowhere")
    (problem,) = check_datasets(DataConfig(datasets=[named(tmp_path / "*.jsonl")]))
    assert "b.jsonl: is a link to a missing file" in problem


def test_what_was_opened_is_what_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, pipe = tmp_path / "a.jsonl", tmp_path / "pipe"
    file.write_text(LINE)
    os.mkfifo(pipe)
    plain = os.open

    def swap_first(path: Any, flags: int, *more: Any) -> int:
        if path == file:
            os.replace(pipe, file)
        return plain(path, flags, *more)

    monkeypatch.setattr(opening.os, "open", swap_first)
    with pytest.raises(DataError, match="is a named pipe"):
        open_regular(file)


@pytest.mark.parametrize(
    ("suffix", "pack", "filling"), [(".gz", gzip.compress, b"\n"), (".zst", zst, b"a")]
)
def test_a_bomb_is_refused_before_it_is_unpacked(
    suffix: str, pack: Callable[[bytes], bytes], filling: bytes, tmp_path: Path, base: Any
) -> None:
    file = tmp_path / f"d.jsonl{suffix}"
    piece = pack(filling * (16 << 20))
    file.write_bytes(pack(LINE.encode()) + piece * 600)  # 10 GB
    started = time.process_time()
    (problem,) = problems_of(file, base, num_proc=1)
    assert time.process_time() - started < 20
    assert "times its size; data.limits.expansion is 200; raise it if the data is" in problem
    assert problem.startswith(f"d.jsonl{suffix}: decompresses to ")


def test_text_that_packs_well_is_not_a_bomb(tmp_path: Path, base: Any) -> None:
    file = tmp_path / "d.jsonl.gz"
    file.write_bytes(gzip.compress(LINE.encode() * 2_000))
    assert prepare(file, base, num_proc=1).counts.rows == 2_000


def test_a_parquet_bomb_is_refused(
    tmp_path: Path, base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "FREE_EXPANSION", 1 << 20)
    file = tmp_path / "d.parquet"
    text = pyarrow.array(["a" * (1 << 20)] * 64)
    schema = pyarrow.schema([("instruction", pyarrow.string()), ("output", pyarrow.string())])
    with pyarrow.parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        for _ in range(4):
            writer.write_table(pyarrow.table({"instruction": text, "output": text}))
    (problem,) = problems_of(file, base)
    assert problem.startswith("d.parquet: decompresses to ")


SHAPES = {
    "text": lambda text, rows: pyarrow.array([text] * rows),
    "list": lambda text, rows: pyarrow.array([[text] * rows]),
    "struct": lambda text, rows: pyarrow.array([{"a": {"b": text}}] * rows),
}


@pytest.mark.parametrize(
    ("shape", "suffix"),
    [("text", ".parquet"), ("list", ".parquet"), ("struct", ".parquet"), ("text", ".arrow")],
)
def test_a_dictionary_bomb_is_refused_before_it_is_expanded(
    shape: str, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(text: str, rows: int) -> Path:
        values = SHAPES[shape](text, rows)
        file = tmp_path / f"d{suffix}"
        if suffix == ".parquet":
            pyarrow.parquet.write_table(pyarrow.table({"a": values}), file, compression="zstd")
            return file
        coded = pyarrow.array([text]).dictionary_encode()
        indices = pyarrow.array([0] * rows, pyarrow.int32())
        column = pyarrow.DictionaryArray.from_arrays(indices, coded.dictionary)
        table = pyarrow.table({"a": column})
        with pyarrow.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        return file

    assert sum(chunk.count() for chunk in read_chunks(str(write("a" * 5_000, 3_000)))) in (1, 3_000)
    bomb = write("a" * 50_000, 2_000)
    if suffix == ".parquet":
        monkeypatch.setattr(tables, "_batches", lambda *_: pytest.fail("was expanded"))
    with pytest.raises(DataError, match=r"decompresses to .*data\.limits\.expansion is 200"):
        list(read_chunks(str(bomb)))


ROWS = {
    "nesting": (
        '"x": ' + "[" * 150 + "]" * 150,
        ":2 is nested more than 100 deep; data.limits.nesting is 100",
    ),
    "recursion": ('"x": ' + "[" * 50_000 + "]" * 50_000, ":2 is nested more than 100 deep; data."),
    "columns": (
        ", ".join(f'"k{number}": 1' for number in range(10_001)),
        ":2 has 10,003 columns or keys; data.limits.columns is 10,000; raise it if",
    ),
    "key_chars": (f'"{"k" * 1500}": 1', ":2 has a key of 1,500 characters; data.limits.key_chars"),
    "digits": ('"x": ' + "9" * 5000, ":2 has a number of more than 4,300 digits, which Python"),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_a_row_beyond_a_limit_is_named(name: str, suffix: str, tmp_path: Path, base: Any) -> None:
    more, said = ROWS[name]
    bad = f"{LINE.strip()[:-1]}, {more}}}"
    rows = [LINE.strip(), bad, LINE.strip()]
    text = "\n".join(rows) if suffix == ".jsonl" else "[" + ",\n".join(rows) + "]"
    file = tmp_path / f"d{suffix}"
    file.write_text(text)
    (problem,) = problems_of(file, base)
    assert problem.startswith(f"d{suffix}{said}"), problem
    if (name, suffix) != ("recursion", ".json"):  # there its end cannot be found
        assert prepare(file, base, on_bad_row="quarantine").counts.kept == 2
    limits = {"nesting": {"nesting": 300}, "columns": {"columns": 20_000}}.get(name)
    if limits is not None:
        assert prepare(file, base, limits=ReadLimits(**limits)).counts.kept == 3


def test_the_deepest_call_within_the_limit_is_tokenized(tmp_path: Path, base: Any) -> None:
    def row(depth: int) -> dict[str, Any]:
        value: Any = "deep"
        for number in range(depth):
            value = [value] if number % 2 else {"a": value}
        tool = {"name": "look", "parameters": {"type": "object", "properties": value}}
        function = {"name": "look", "arguments": {"at": value}}
        turns = [
            {"role": "user", "content": "see"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
        ]
        return {"messages": turns, "tools": [{"type": "function", "function": tool}]}

    settings = {"chat_template": "qwen3", "on_long": "truncate_left"}
    file = write(tmp_path / "d.jsonl", [row(93)])
    assert prepare(file, base, **settings).counts.kept == 1
    (problem,) = problems_of(write(file, [row(94)]), base, **settings)
    assert problem.startswith("d.jsonl:1 is nested more than 100 deep")


def test_a_key_that_occurs_twice_among_many_is_found_at_once(tmp_path: Path, base: Any) -> None:
    many = ", ".join(f'"k{number}": 1' for number in range(100_000))
    file = tmp_path / "d.jsonl"
    file.write_text(f'{{{many}, "k99999": 2}}\n')
    started = time.monotonic()
    (problem,) = problems_of(file, base)
    assert problem == "d.jsonl:1 key 'k99999' occurs twice; keep one of them"
    assert time.monotonic() - started < 60  # compared with each other they take hours


def test_too_many_columns_are_refused_at_once(tmp_path: Path, base: Any) -> None:
    names = [f"c{number}" for number in range(10_001)]
    (tmp_path / "d.csv").write_text(",".join(names) + "\n" + ",".join("1" for _ in names) + "\n")
    (problem,) = problems_of(tmp_path / "d.csv", base)
    assert problem.startswith("d.csv:1 has 10,001 columns or keys; data.limits.columns is 10,000")
    pyarrow.parquet.write_table(
        pyarrow.table({name: [1] for name in names}), tmp_path / "d.parquet"
    )
    (problem,) = problems_of(tmp_path / "d.parquet", base)
    assert problem.startswith("d.parquet: has 10,001 columns or keys; data.limits.columns is")


def test_what_a_message_quotes_is_short(tmp_path: Path, base: Any) -> None:
    row = {f"{number}{'k' * 500}": 1 for number in range(5_000)}
    (tmp_path / "d.jsonl").write_text(json.dumps({"instruction": "q", **row}) + "\n")
    (problem,) = problems_of(tmp_path / "d.jsonl", base)
    assert len(problem) < 5_000 and ", and 4,981 more]" in problem
