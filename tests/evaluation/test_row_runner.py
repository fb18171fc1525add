"""Rows are divided among ranks, kept as they are done, and never done twice."""

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
    """Squares rows, two a batch, the last first; dies after `most` batches."""

    def __init__(self, most: int = 99) -> None:
        self.most, self.done = most, []

    def __call__(self, chosen: list[int]) -> Iterator[list[tuple[int, Any]]]:
        for number, index in enumerate(reversed(range(0, len(chosen), 2))):
            if number == self.most:
                raise KeyboardInterrupt
            batch = list(range(index, min(index + 2, len(chosen))))
            self.done += [chosen[i] for i in batch]
            yield [(i, chosen[i] ** 2) for i in batch]


SQUARES = [n**2 for n in range(7)]


def test_a_killed_evaluation_goes_on_where_it_was(tmp_path: Path) -> None:
    first, again = Work(most=2), Work()
    with pytest.raises(KeyboardInterrupt):
        RowRunner(folder=tmp_path, identity="a").run("task", ["rows"], 7, first)
    assert RowRunner(folder=tmp_path, identity="a").run("task", ["rows"], 7, again) == SQUARES
    assert sorted(first.done + again.done) == list(range(7))
    assert len(first.done) == 3


def test_a_line_that_a_kill_cut_off_is_done_again(tmp_path: Path) -> None:
    runner = RowRunner(folder=tmp_path)
    runner.run("task", [], 7, Work())
    (file,) = (tmp_path / PARTIAL).iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    again = Work()
    assert runner.run("task", [], 7, again) == SQUARES
    assert len(again.done) == 1
    assert runner.run("task", [], 7, last := Work()) == SQUARES and not last.done


@pytest.mark.parametrize("change", [{"identity": "b"}, {"content": ["others"]}, {"key": "other"}])
def test_what_others_have_given_is_not_taken(change: dict[str, Any], tmp_path: Path) -> None:
    how = {"identity": "a", "content": ["rows"], "key": "task"}
    for one in (how, how | change):
        work = Work()
        runner = RowRunner(folder=tmp_path, identity=one["identity"])
        assert runner.run(one["key"], one["content"], 7, work) == SQUARES
        assert sorted(work.done) == list(range(7))


@pytest.mark.parametrize("num_ranks", [2, 3, 7])
def test_ranks_that_come_at_their_own_times_have_each_row_once(
    num_ranks: int, tmp_path: Path
) -> None:
    parts: list[list[Any]] = [[None] * num_ranks for _ in range(2)]  # a list a call of gather
    meet = threading.Barrier(num_ranks, timeout=20)
    works = [Work() for _ in range(num_ranks)]

    def run(rank: int) -> list[Any]:
        time.sleep(0.1 * rank)
        calls = iter(parts)

        def gather(own: dict[int, Any]) -> list[dict[int, Any]]:
            call = next(calls)
            call[rank] = own
            meet.wait()
            return call

        runner = RowRunner(folder=tmp_path, rank=rank, num_ranks=num_ranks, gather=gather)
        return runner.run("task", [], 7, works[rank])

    with ThreadPoolExecutor(num_ranks) as pool:
        assert list(pool.map(run, range(num_ranks))) == [SQUARES] * num_ranks
    assert sorted(row for work in works for row in work.done) == list(range(7))


def test_all_is_gone_once_it_is_written_elsewhere(tmp_path: Path) -> None:
    runner = RowRunner(folder=tmp_path)
    assert runner.once("losses", [], lambda: {"val/loss": 1.5}) == {"val/loss": 1.5}
    assert runner.once("losses", [], lambda: 1 / 0) == {"val/loss": 1.5}
    runner.clear()
    assert list(tmp_path.iterdir()) == []
