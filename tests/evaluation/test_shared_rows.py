"""Rows are divided among ranks, kept as they are done, and never done twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.evaluation.shares import PARTIAL, Shares


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
        Shares(folder=tmp_path, identity="a").run("task", ["rows"], 7, first)
    assert Shares(folder=tmp_path, identity="a").run("task", ["rows"], 7, again) == SQUARES
    assert sorted(first.done + again.done) == list(range(7))
    assert len(first.done) == 3


def test_a_line_that_a_kill_cut_off_is_done_again(tmp_path: Path) -> None:
    shares = Shares(folder=tmp_path)
    shares.run("task", [], 7, Work())
    (file,) = (tmp_path / PARTIAL).iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    again = Work()
    assert shares.run("task", [], 7, again) == SQUARES
    assert len(again.done) == 1
    assert shares.run("task", [], 7, last := Work()) == SQUARES and not last.done


@pytest.mark.parametrize("change", [{"identity": "b"}, {"content": ["others"]}, {"key": "other"}])
def test_what_others_have_given_is_not_taken(change: dict[str, Any], tmp_path: Path) -> None:
    how = {"identity": "a", "content": ["rows"], "key": "task"}
    for one in (how, how | change):
        work = Work()
        shares = Shares(folder=tmp_path, identity=one["identity"])
        assert shares.run(one["key"], one["content"], 7, work) == SQUARES
        assert sorted(work.done) == list(range(7))


@pytest.mark.parametrize("num_ranks", [2, 3, 7])
def test_ranks_have_each_row_once_between_them(num_ranks: int, tmp_path: Path) -> None:
    parts: list[dict[int, int]] = []
    done = []
    for rank in range(num_ranks):
        work = Work()

        def gather(own: dict[int, int]) -> list[dict[int, int]]:
            parts.append(own)
            return parts

        shares = Shares(rank=rank, num_ranks=num_ranks, gather=gather)
        if rank < num_ranks - 1:
            with pytest.raises(KeyError):  # the others have not given theirs
                shares.run("task", [], 7, work)
        else:
            assert shares.run("task", [], 7, work) == SQUARES
        done += work.done
    assert sorted(done) == list(range(7))


def test_all_is_gone_once_it_is_written_elsewhere(tmp_path: Path) -> None:
    shares = Shares(folder=tmp_path)
    assert shares.once("losses", [], lambda: {"val/loss": 1.5}) == {"val/loss": 1.5}
    assert shares.once("losses", [], lambda: 1 / 0) == {"val/loss": 1.5}
    shares.clear()
    assert list(tmp_path.iterdir()) == []
