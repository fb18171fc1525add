"""Files as people have them, with a mistake: said before torch is there; mended, they pass.

Each case's twin differs in the mistake alone; `tests/data_modules/test_readers.py` has more.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from data_modules import DataConfig, check_datasets
from data_modules.source import Chunk
from data_modules.tokens.encode import ChunkEncoder, EncodedChunk
from tests.bad_input.prepared import ROWS, chat, named, prepare, problems_of, write
from tests.conftest import ROOT
from tests.data_modules.conftest import parquet_bytes
from tests.in_process import make_data, run_command
from tests.processes import LONGEST


@pytest.mark.parametrize(
    ("name", "bad", "told", "twin"),
    [
        ("d.jsonl", b"", "d.jsonl: 0 rows; give a file with at least one row", b"GOOD\n"),
        ("d.jsonl", b'GOOD\n{"messa', "d.jsonl:2 line is cut off (no newline)", b"GOOD"),
        ("d.json", b"[GOOD,\nGOOD", "d.json:2:109 invalid JSON: Exp", b"[GOOD,\nGOOD]"),
        ("d.json", b'{\n"data": [GOOD]\n}', "are its rows under 'data'?", b"[GOOD]"),
        ("d.jsonl", b"[\nGOOD]", "d.jsonl: holds a JSON array, not one row", b"GOOD"),
        (
            "d.csv",
            b"instruction,ouput\nq,one\n",
            "d.csv:2 columns ['instruction', 'ouput']: format not recognized; did "
            "you mean 'output' instead of 'ouput'?",
            b"instruction,output\nq,one\n",
        ),
        (
            "d.csv",
            b'instruction,output\nq,"one\nq,two\n',
            "d.csv:2 broken CSV: unexpected end of data; is a quote not closed? (columns: instr",
            b'instruction,output\nq,"one"\nq,two\n',
        ),
        ("d.json.gz", b"[GOOD]", "d.json.gz: is not gzip-compressed; name it without", b"GZIP"),
        ("d.jsonl", b"GZIP", "d.jsonl: is gzip-compressed; name it .gz", b"GOOD\n"),
        ("d.json.gz", b"GZIP-10", "d.json.gz: cannot be read to its end: ", b"GZIP"),
        ("d.parquet", b"PAR1no", "d.parquet: not a readable parquet file: ", b"PARQUET"),
        ("d.xlsx", b"PK", "d.xlsx: cannot read .xlsx; use .json, .jsonl", None),
    ],
)
def test_a_bad_file_is_named(
    name: str, bad: bytes, told: str, twin: bytes | None, tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_bytes(filled(bad))
    problems = check_datasets(DataConfig(datasets=[named(file)]))
    assert len(problems) == 1 and told in problems[0], problems
    assert str(file) in problems[0]
    if twin is not None:
        file.write_bytes(filled(twin))
        assert check_datasets(DataConfig(datasets=[named(file)])) == []


def filled(content: bytes) -> bytes:
    """Return `content` with a row in place of GOOD, and whole files for the other words."""
    good = json.dumps(ROWS[0])
    zipped = gzip.compress(f"[{good}]".encode())
    parquet = parquet_bytes([{"instruction": "q", "output": "one"}])
    content = content.replace(b"GZIP-10", zipped[:-10]).replace(b"GZIP", zipped)
    return content.replace(b"PARQUET", parquet).replace(b"GOOD", good.encode())


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    data = make_data(tmp_path / "lists.jsonl")
    (tmp_path / "empty").mkdir()
    for path, told in (
        ("*.csv", r"\*.csv: no file matches \(searched from \S+/\); .* has .*lists.jsonl"),
        ("list.jsonl", r"list.jsonl: no such file \(searched from \S+/\); did you mean lists"),
        ("no/lists.jsonl", "no/lists.jsonl: no such file .*; check data.datasets"),
        ("/nope", r"/nope: no such file .*; check data\.datasets"),  # and not "did you mean /opt"
        ("empty", "empty: no data file for split 'train' in this folder; found nothing"),
    ):
        (problem,) = check_datasets(DataConfig(datasets=[named(tmp_path / path)]))
        told = told.replace("main/", f"{Path.cwd().name}/")
        assert re.match(told, problem.replace(f"{tmp_path}/", "")), problem
    for good in (data, tmp_path / "*.jsonl"):
        assert check_datasets(DataConfig(datasets=[named(good)])) == []


@pytest.mark.parametrize("chunk_bytes", [200, 1 << 20])
def test_a_file_that_is_written_while_it_is_read(
    chunk_bytes: int, tmp_path: Path, base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_modules.source.opening.CHUNK_BYTES", chunk_bytes)
    file = write(tmp_path / "d.jsonl", ROWS)
    size, encode = file.stat().st_size, ChunkEncoder.__call__

    def append(encoder: ChunkEncoder, chunk: Chunk) -> EncodedChunk:
        if file.stat().st_size == size:
            with file.open("a") as stream:
                stream.write(json.dumps(ROWS[0]) + "\n")
        return encode(encoder, chunk)

    with monkeypatch.context() as patch:
        patch.setattr(ChunkEncoder, "__call__", append)
        (problem,) = problems_of(file, base, num_proc=1)
    assert "d.jsonl: changed while it was being read; start again" in problem
    assert not list((tmp_path / "cache").glob("*/key.json"))
    assert prepare(file, base).counts.rows == len(ROWS) + 1


def test_problems_of_several_files_are_listed_together(tmp_path: Path) -> None:
    good, bad = make_data(tmp_path / "lists.jsonl"), tmp_path / "bad.jsonl"
    bad.write_text(good.read_text() + '{"instruction": "q", "output": }\n{"instruction": "q"}\n')
    words = ["model=tiny", "data.test_datasets=[]"]
    paths = [bad, tmp_path / "list.jsonl"]
    both = ", ".join(f"{{path: {path}}}" for path in paths)
    result = run_command(*words, f"data.datasets=[{both}, {{path: {good}, weight: -1}}]")
    assert result.code == 2 and result.config is None
    assert result.stderr.replace(f"{tmp_path}/", "").splitlines() == [
        "error: 4 problems",
        "  1. data.datasets[2].weight=-1.0: expected above 0 (or leave the data set out)",
        '  2. bad.jsonl:5:32 invalid JSON: Expecting value, near `on": "q", "output": }`',
        "  3. bad.jsonl:6 missing 'output'; found ['instruction'] (4 rows are of format alpaca, "
        "first bad.jsonl:1)",
        f"  4. list.jsonl: no such file (searched from {Path.cwd().name}/); did you mean "
        "lists.jsonl or bad.jsonl?",
    ]
    aside = run_command(*words, f"data.datasets=[{{path: {bad}}}]", "data.on_bad_row=quarantine")
    assert aside.code == 0, aside.stderr
    assert run_command(*words, f"data.datasets=[{{path: {good}, weight: 1}}]").code == 0


def test_a_bad_row_ends_a_typed_run_with_two(tmp_path: Path) -> None:
    write(tmp_path / "d.jsonl", [*ROWS, chat("q", "one", weight=-1)])
    words = ["model=tiny", "output.dir=run", "data.datasets=[{path: d.jsonl}]"]
    done = subprocess.run(
        [sys.executable, "-m", "app.train", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LONGEST,
    )
    assert done.returncode == 2
    assert done.stderr.strip().endswith("d.jsonl:13 weight is -1; a weight is a number from 0 up")
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "run").exists()
