"""Data files with random damage: an error that names the file, a row put aside, or sound rows.

60 mutations of each kind of file, by fixed seeds: bits flipped, cut, repeated, numbers made huge,
values of other types, deep nesting. Files that C code reads are read by a process of their own.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import random
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from common.errors import DataError
from data_modules import DataConfig
from data_modules.tokens.encode import Rejected, chunks_of, find_format, read_chunk
from data_modules.types import Conversation, Document, Item, Tokens
from tests import mutations
from tests.bad_input.opened import at_most
from tests.bad_input.prepared import chat, named, prepare
from tests.data_modules.conftest import lines_of, parquet_bytes, zst
from tests.processes import LONGEST
from tests.reliability.shell import Shell

pytestmark = pytest.mark.slow

NUM_MUTATIONS = 60
NUM_PREPARED = 4
"""mutations of each kind that are tokenized too"""
MAX_SECONDS = 20
ROOT = Path(__file__).parents[2]

CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
MESSAGES = [
    chat("what is it?", "one", weight=0.5),
    {
        "messages": [
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": [{"type": "text", "text": "see"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "5", "tool_call_id": "a"},
            {"role": "assistant", "content": "five", "reasoning": "hm", "train": True},
        ],
        "tools": [TOOL],
    },
    chat("é\u2028 and more?", "two"),
]
SHAREGPT = [
    {
        "conversations": [
            {"from": "human", "value": "look"},
            {"from": "function_call", "value": '{"name": "look", "arguments": {"at": 1}}'},
            {"from": "observation", "value": "5"},
            {"from": "gpt", "value": "five"},
        ],
        "system": "be kind",
        "tools": json.dumps([TOOL["function"]]),
    }
] * 3
ALPACA = [
    {"instruction": f"say {number}", "input": "a, b", "output": f'one "{number}"'}
    for number in range(4)
]
TOKENS = [
    {"input_ids": [1, 2, 3, 4], "labels": [-100, 2, 3, 4], "attention_mask": [1, 1, 1, 1]},
    {"input_ids": [5, 6], "loss_mask": [0, 1], "weights": [0.5, 2.0]},
]
REPLY = {"role": "assistant", "text": "one", "replies": []}
TREE = {"role": "prompter", "text": "what?", "replies": [REPLY, {**REPLY, "deleted": True}]}
OASST = [{"message_tree_id": str(number), "prompt": TREE} for number in range(2)]


def cells(mark: str) -> bytes:
    """Return rows with text in quotes."""
    quoted = [[f'"{value}"'.replace('one "', 'one ""') for value in row.values()] for row in ALPACA]
    table = [list(ALPACA[0]), *quoted]
    return "\n".join(mark.join(row) for row in table).encode()


def arrow(new: Callable[..., Any], compression: str | None = None) -> bytes:
    """Return rows in one of arrow's two formats, with a column of each kind."""
    texts = pyarrow.array([f"say {number}" for number in range(20)])
    batch = pyarrow.RecordBatch.from_pydict(
        {
            "instruction": texts.dictionary_encode(),
            "output": texts,
            "more": pyarrow.array([[{"a": number, "b": "x"}] * 2 for number in range(20)]),
            "large": texts.cast(pyarrow.large_string()),
        }
    )
    sink = pyarrow.BufferOutputStream()
    options = pyarrow.ipc.IpcWriteOptions(compression=compression)
    with new(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
        writer.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data


TEXTS: dict[str, tuple[str, list[dict[str, Any]] | None, bytes]] = {
    "messages": ("d.jsonl", MESSAGES, lines_of(MESSAGES)),
    "sharegpt with tools": ("d.json", SHAREGPT, json.dumps(SHAREGPT, indent=1).encode()),
    "alpaca": ("d.json", ALPACA, json.dumps(ALPACA, indent=1).encode()),
    "pretokenized": ("d.jsonl", TOKENS, lines_of(TOKENS)),
    "oasst": ("d.jsonl", OASST, lines_of(OASST)),
    "csv": ("d.csv", None, cells(",")),
    "tsv": ("d.tsv", None, cells("\t")),
    "txt": ("d.txt", None, b"one line\n\nand a paragraph\nof two\n\n\nmore\n" * 3),
}
BINARIES: dict[str, tuple[str, bytes]] = {
    "gz": ("d.jsonl.gz", gzip.compress(lines_of(MESSAGES) * 20, mtime=0)),
    "zst": ("d.jsonl.zst", zst(lines_of(MESSAGES) * 20)),
    "parquet": ("d.parquet", parquet_bytes(ALPACA * 10)),
    "nested parquet": ("d.parquet", parquet_bytes(SHAREGPT, compression="zstd")),
    "arrow file": ("d.arrow", arrow(pyarrow.ipc.new_file)),
    "arrow stream": ("d.arrow", arrow(pyarrow.ipc.new_stream)),
    "packed arrow": ("d.arrow", arrow(pyarrow.ipc.new_stream, "zstd")),
}


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Return bytes with one or several places changed."""
    data = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 5))):
        place = chance.randrange(max(1, len(data)))
        size = min(len(data) - place, chance.choice((1, 4, 8, 64)))
        match chance.randrange(7):
            case 0:
                data[place : place + 1] = bytes([chance.randrange(256)])
            case 1:
                data = data[:place]
            case 2:
                data[place:place] = data[place : place + size] * chance.choice((1, 3, 1000))
            case 3:
                del data[place : place + size]
            case 4:
                data[place : place + size] = chance.randbytes(size)
            case 5:
                word = chance.choice((0, 0xFF, 0x7F))
                data[place : place + 4] = bytes([0xFF, 0xFF, 0xFF, word])
            case _:
                data[place : place + size] = bytes(size)
    return bytes(data)


def mutated(name: str) -> Iterator[tuple[str, bytes]]:
    """Yield file name and content of each mutation of a kind of file."""
    chance = random.Random(name)
    for number in range(NUM_MUTATIONS):
        if name in BINARIES:
            file, content = BINARIES[name]
            yield file, damaged(content, chance)
            continue
        file, rows, content = TEXTS[name]
        if rows is None or number % 3 == 0:
            yield file, damaged(content, chance)
        else:
            changed = mutations.mutate_tree(rows, chance)
            lines = [changed] if file.endswith(".json") else changed
            yield file, b"\n".join(map(mutations.dump_json, lines))


def check_item(item: Item) -> None:
    """Fail where an item is not what the template may rely on."""
    if isinstance(item, Conversation):
        weights = [turn.weight for turn in item.turns if turn.weight is not None]
        for turn in item.turns:
            turn.content.encode()
            assert turn.role in ("system", "user", "assistant", "tool")
    elif isinstance(item, Document):
        weights = [segment.weight for segment in item.segments]
        for segment in item.segments:
            segment.text.encode()
    else:
        assert isinstance(item, Tokens) and len(item.input_ids) == len(item.weights)
        weights = list(item.weights)
    assert all(math.isfinite(weight) and weight >= 0 for weight in weights)


def read(file: Path) -> None:
    config = DataConfig(datasets=[named(file)])
    dataset = config.datasets[0]
    try:
        format_name, chunks = find_format(dataset, chunks_of(dataset, config))
        for chunk in chunks:
            found = list(read_chunk(chunk, format_name or "", dataset))
            assert len(found) == chunk.count()
            for one in found:
                if isinstance(one, Rejected):
                    assert one.problem.startswith(f"{file}:") and len(one.problem) < 10_000
                else:
                    for item in one:
                        check_item(item)
    except DataError as error:
        for problem in error.problems:
            assert str(file) in problem and len(problem) < 10_000, problem


def read_all(name: str, folder: Path) -> None:
    """Read all mutations of a kind; the one that fails is left in `folder`."""
    for number, (file_name, content) in enumerate(mutated(name)):
        file = folder / file_name
        file.write_bytes(content)
        (folder / "last").write_text(f"{name}, mutation {number}")
        with at_most(MAX_SECONDS):
            read(file)


@pytest.mark.parametrize("name", TEXTS)
def test_damaged_text_never_ends_otherwise(name: str, tmp_path: Path) -> None:
    read_all(name, tmp_path)


def test_damaged_bytes_never_end_otherwise(shell: Shell, tmp_path: Path) -> None:
    done = subprocess.run(
        [shell.python, "-m", "tests.bad_input.test_data_fuzz", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LONGEST,
    )
    last = (tmp_path / "last").read_text()
    assert done.returncode == 0, f"{last}: {done.returncode}\n{done.stderr}"


@pytest.mark.parametrize("name", TEXTS)
def test_damaged_text_is_tokenized_or_refused(name: str, tmp_path: Path, base: Any) -> None:
    for number, (file_name, content) in enumerate(mutated(name)):
        if number % (NUM_MUTATIONS // NUM_PREPARED):
            continue
        file = tmp_path / str(number) / file_name
        file.parent.mkdir()
        file.write_bytes(content)
        try:
            with at_most(MAX_SECONDS):
                prepare(file, base, on_bad_row="quarantine", num_proc=1)
        except DataError as error:
            assert all(str(file) in problem for problem in error.problems), error.problems


if __name__ == "__main__":
    # What a file claims must not be taken from the machine.
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    for each in BINARIES:
        read_all(each, Path(sys.argv[1]))
