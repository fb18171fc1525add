"""Rows are divided among ranks, saved as they are computed, and never computed twice."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from app.evaluation.row_runner import PARTIAL, RowRunner


class Work:
    """Squares rows in batches of two, last batch first; interrupted after `max_batches`."""

    def __init__(self, max_batches: int = 99) -> None:
        self.max_batches, self.done = max_batches, []

    def __call__(self, rows: list[int]) -> Iterator[list[tuple[int, Any]]]:
        for number, index in enumerate(reversed(range(0, len(rows), 2))):
            if number == self.max_batches:
                raise KeyboardInterrupt
            batch = list(range(index, min(index + 2, len(rows))))
            self.done += [rows[i] for i in batch]
            yield [(i, rows[i] ** 2) for i in batch]


SQUARES = [n**2 for n in range(7)]


def test_a_killed_evaluation_resumes(tmp_path: Path) -> None:
    first, again = Work(max_batches=2), Work()
    with pytest.raises(KeyboardInterrupt):
        RowRunner(folder=tmp_path, identity="a").run("task", ["rows"], 7, first)
    assert RowRunner(folder=tmp_path, identity="a").run("task", ["rows"], 7, again) == SQUARES
    assert sorted(first.done + again.done) == list(range(7))
    assert len(first.done) == 3


def test_a_row_with_an_incomplete_line_is_computed_again(tmp_path: Path) -> None:
    runner = RowRunner(folder=tmp_path)
    runner.run("task", [], 7, Work())
    (file,) = (tmp_path / PARTIAL).iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    again = Work()
    assert runner.run("task", [], 7, again) == SQUARES
    assert len(again.done) == 1
    assert runner.run("task", [], 7, last := Work()) == SQUARES and not last.done


@pytest.mark.parametrize("change", [{"identity": "b"}, {"content": ["others"]}, {"key": "other"}])
def test_results_of_another_evaluation_are_not_reused(
    change: dict[str, Any], tmp_path: Path
) -> None:
    first = {"identity": "a", "content": ["rows"], "key": "task"}
    for run in (first, first | change):
        work = Work()
        runner = RowRunner(folder=tmp_path, identity=run["identity"])
        assert runner.run(run["key"], run["content"], 7, work) == SQUARES
        assert sorted(work.done) == list(range(7))


def test_ranks_that_start_at_different_times_compute_each_row_once(tmp_path: Path) -> None:
    num_ranks = 3
    parts: list[list[Any]] = [[None] * num_ranks for _ in range(2)]  # one list per call of gather
    barrier = threading.Barrier(num_ranks, timeout=20)
    works = [Work() for _ in range(num_ranks)]

    def run(rank: int) -> list[Any]:
        time.sleep(0.1 * rank)
        calls = iter(parts)

        def gather(own: dict[int, Any]) -> list[dict[int, Any]]:
            call = next(calls)
            call[rank] = own
            barrier.wait()
            return call

        runner = RowRunner(folder=tmp_path, rank=rank, num_ranks=num_ranks, gather=gather)
        return runner.run("task", [], 7, works[rank])

    with ThreadPoolExecutor(num_ranks) as pool:
        assert list(pool.map(run, range(num_ranks))) == [SQUARES] * num_ranks
    assert sorted(row for work in works for row in work.done) == list(range(7))


def test_partial_results_are_removed_at_the_end(tmp_path: Path) -> None:
    runner = RowRunner(folder=tmp_path)
    assert runner.run_once("losses", [], lambda: {"val/loss": 1.5}) == {"val/loss": 1.5}
    assert runner.run_once("losses", [], lambda: 1 / 0) == {"val/loss": 1.5}
    runner.remove_partial_results()
    assert list(tmp_path.iterdir()) == []
