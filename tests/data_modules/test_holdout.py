"""What is held out is never learned, in any data set; as many rows as asked for, no more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_modules.messages import DataError
from data_modules.packing.mixture import Split, hold_out


def store(contents: list[int], documents_a_row: int = 1) -> Any:
    """Return a store of rows with these contents; each row may be several documents."""
    rows = np.repeat(np.arange(len(contents)), documents_a_row)
    digests = np.repeat(np.array(contents, np.uint64), documents_a_row) * np.uint64(1000)
    digests += np.tile(np.arange(documents_a_row), len(contents)).astype(np.uint64)
    return SimpleNamespace(rows=rows, digests=digests)


def sides_of(*stores: Any, size: float, max_rows: int | None = None, seed: int = 0) -> list[Split]:
    names = [f"set{number}" for number in range(len(stores))]
    return hold_out(stores, names, names, [max_rows] * len(stores), size, seed)


contents = st.lists(st.integers(0, 30), min_size=1, max_size=40)


@given(
    st.lists(contents, min_size=1, max_size=3),
    st.floats(0, 0.9),
    st.integers(1, 3),
    st.integers(0, 5),
)
def test_no_content_is_on_both_sides(
    sets: list[list[int]], size: float, documents_a_row: int, seed: int
) -> None:
    stores = [store(one, documents_a_row) for one in sets]
    sides = sides_of(*stores, size=size, seed=seed)
    held_out = {d for s, o in zip(stores, sides, strict=True) for d in s.digests[o.validation]}
    learned = {d for s, o in zip(stores, sides, strict=True) for d in s.digests[o.training]}
    assert not held_out & learned
    for one, side in zip(stores, sides, strict=True):
        assert not (side.training & side.validation).any()
        # A row is never cut apart.
        for row in np.unique(one.rows):
            own = one.rows == row
            assert len({*zip(side.training[own], side.validation[own], strict=True)}) == 1
        left_out = ~(side.training | side.validation)
        assert len(np.unique(one.rows[left_out])) == side.repeated_rows


@given(st.integers(2, 60), st.integers(1, 59), st.integers(0, 5))
def test_rows_that_differ_are_held_out_to_the_number(count: int, requested: int, seed: int) -> None:
    if requested >= count:
        return
    (side,) = sides_of(store(list(range(count))), size=requested, seed=seed)
    assert side.validation.sum() == requested and side.training.sum() == count - requested


def test_rows_alike_never_make_it_more_than_asked_for() -> None:
    alike = [0] * 900 + [1, 2, 3, 4, 5, 6, 7, 8, 9]
    for seed in range(5):
        (side,) = sides_of(store(alike), size=5, seed=seed)
        assert side.validation.sum() == 5 and side.training.sum() == 904


def test_rows_all_alike_hold_none_out() -> None:
    (side,) = sides_of(store([7] * 20), size=0.1)
    assert not side.validation.any() and side.training.all()


def test_a_row_of_another_data_set_that_is_held_out_is_masked() -> None:
    sides = sides_of(store(list(range(20))), store(list(range(20))), size=4)
    repeated = [side.repeated_rows for side in sides]
    assert all(side.validation.sum() == 4 for side in sides)
    assert [int(side.training.sum()) for side in sides] == [16 - count for count in repeated]
    assert sum(repeated) > 0


def test_a_cap_counts_rows_and_is_a_seeded_choice() -> None:
    one = store(list(range(30)), documents_a_row=3)
    (side,) = sides_of(one, size=2, max_rows=10)
    assert len(np.unique(one.rows[side.training])) == 10 and side.training.sum() == 30
    (again,) = sides_of(one, size=2, max_rows=10)
    assert (side.training == again.training).all()
    (other,) = sides_of(one, size=2, max_rows=10, seed=1)
    assert (side.training != other.training).any()


def test_more_rows_than_there_are_is_an_error() -> None:
    with pytest.raises(DataError, match=r"set0: data\.val_set_size=20 leaves none of its 20 rows"):
        sides_of(store(list(range(20))), size=20)
    (side,) = sides_of(store([1]), size=1)
    assert side.training.all()


@pytest.mark.parametrize(
    ("rows", "size", "count"),
    [(100, 0.05, 5), (100, 0, 0), (3, 0.05, 1), (2, 0.9, 1), (1, 0.5, 0), (100, 7, 7)],
)
def test_sizes(rows: int, size: float, count: int) -> None:
    (side,) = sides_of(store(list(range(rows))), size=size)
    assert side.validation.sum() == count


def test_the_choice_depends_on_seed_and_name_only() -> None:
    one = store(list(range(100)))
    chosen, other_name = sides_of(one, one, size=0.1)
    assert (chosen.validation == sides_of(one, size=0.1)[0].validation).all()
    assert (chosen.validation != other_name.validation).any()
    assert (chosen.validation != sides_of(one, size=0.1, seed=1)[0].validation).any()
