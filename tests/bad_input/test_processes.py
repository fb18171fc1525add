"""Runs that prepare the same data at once, and one that is killed while it prepares."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from data_modules.source import Chunk, read_chunks
from data_modules.tokens.encode import ChunkEncoder, EncodedChunk
from data_modules.tokens.prepare import Prepared
from tests.bad_input.prepared import chat, prepare, write
from tests.processes import GONE_WITHIN, LONGEST, children_of

pytestmark = pytest.mark.slow


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a file of so many chunks that several processes tokenise it, each slowly."""
    monkeypatch.setattr("data_modules.source.opening.CHUNK_BYTES", 4000)
    encode, encoded = ChunkEncoder.__call__, []

    def slowly(encoder: ChunkEncoder, chunk: Chunk) -> EncodedChunk:
        encoded.append(chunk)
        time.sleep(0.04)
        while len(encoded) > 2 and (tmp_path / "hold").exists():
            time.sleep(0.01)
        return encode(encoder, chunk)

    monkeypatch.setattr(ChunkEncoder, "__call__", slowly)
    rows = [chat(f"what is {i} and {i}?", f"it is {2 * i}") for i in range(1500)]
    file = write(tmp_path / "large.jsonl", rows)
    assert sum(1 for _ in read_chunks(str(file))) > 20
    return file


def content(data: Prepared) -> list[tuple[int, list[int]]]:
    """Return line and ids of each document."""
    store = data.store
    return [
        (int(store.lines[i]), store.example(i, 0).input_ids.tolist()) for i in range(len(store))
    ]


@contextlib.contextmanager
def forked(target: Callable[[], None]) -> Iterator[int]:
    """Run `target` in a process of its own; yields its id, and waits for its end."""
    process = multiprocessing.get_context("fork").Process(target=target)
    process.start()
    assert process.pid is not None
    try:
        yield process.pid
    finally:
        process.join(LONGEST)
        assert not process.is_alive()


def test_two_runs_prepare_the_same_data_at_once(large: Path, base: Any) -> None:
    fork = multiprocessing.get_context("fork")
    results: Any = fork.Queue()
    both = fork.Barrier(2)

    def run() -> None:
        both.wait(LONGEST)
        data = prepare(large, base, num_proc=2)
        results.put((data.how, str(data.folder), content(data)))

    with forked(run), forked(run):
        found = [results.get(timeout=LONGEST) for _ in range(2)]
    assert sorted(how for how, _, _ in found) == [
        "tokenized (now cached)",
        "tokenized by another process",
    ]
    assert found[0][1:] == found[1][1:]
    alone = prepare(large, base, num_proc=1, cache_dir=str(large.parent / "alone"))
    assert content(alone) == found[0][2] and len(found[0][2]) == 1500
    left = {file.name for file in Path(found[0][1]).parent.iterdir()}
    assert {name.partition(".")[2] for name in left} == {"", "lock", "newest"}


def is_running(pid: int) -> bool:
    """Tell whether a process lives; one that only waits to be buried does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="asks /proc for child processes")
def test_a_run_killed_while_it_prepares(large: Path, base: Any) -> None:
    cache = large.parent / "cache"

    def run() -> None:
        prepare(large, base, num_proc=2)

    hold = large.parent / "hold"
    hold.touch()
    with forked(run) as pid:
        until = time.monotonic() + LONGEST
        workers: list[int] = []
        while not (len(workers) == 2 and list(cache.glob("*.tmp-*/*"))):
            assert time.monotonic() < until, "it never began"
            time.sleep(0.01)
            workers = children_of(pid)
        os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + GONE_WITHIN
    while any(map(is_running, workers)):
        assert time.monotonic() < until, "a worker goes on without its run"
        time.sleep(0.01)
    hold.unlink()
    assert list(cache.glob("*.tmp-*")) and not list(cache.glob("*/key.json"))
    after = prepare(large, base, num_proc=2)
    assert after.how == "tokenized (now cached)"
    alone = prepare(large, base, num_proc=1, cache_dir=str(large.parent / "alone"))
    assert content(after) == content(alone) and len(after.store) == 1500
    assert not list(cache.glob("*.tmp-*"))
