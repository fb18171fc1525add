"""How often each row is seen, and which rows are kept for validation."""

from __future__ import annotations

import numpy as np
import pytest

from data_modules.mixture import Mixture, split_rows

GROUPS = [np.arange(10), np.arange(10, 31)]


@pytest.mark.parametrize(("weight", "seen"), [(1.0, {1}), (2.0, {2}), (2.5, {2, 3}), (0.5, {0, 1})])
def test_weight_is_how_often_a_row_is_seen(weight: float, seen: set[int]) -> None:
    rows = Mixture(GROUPS, [weight, 1.0], 0).epoch(0)
    counts = np.bincount(rows, minlength=31)
    assert set(counts[:10].tolist()) == seen
    assert counts[:10].sum() == weight * 10
    assert set(counts[10:].tolist()) == {1}


def test_fraction_goes_on_in_the_next_epoch() -> None:
    mixture = Mixture(GROUPS, [0.3, 1.0], 0)
    parts = [mixture.epoch(epoch) for epoch in range(10)]
    counts = np.bincount(np.concatenate(parts), minlength=31)
    assert set(counts[:10].tolist()) == {3}
    assert not np.array_equal(np.sort(parts[0]), np.sort(parts[1]))


def test_epochs_depend_on_the_seed_only() -> None:
    first = Mixture(GROUPS, [0.5, 1.0], 0).epoch(3)
    assert np.array_equal(first, Mixture(GROUPS, [0.5, 1.0], 0).epoch(3))
    assert not np.array_equal(first, Mixture(GROUPS, [0.5, 1.0], 1).epoch(3))


@pytest.mark.parametrize(
    ("rows", "size", "count"),
    [(100, 0.05, 5), (100, 0, 0), (3, 0.05, 1), (2, 0.9, 1), (1, 0.5, 0), (100, 7, 7), (5, 9, 4)],
)
def test_split_sizes(rows: int, size: float, count: int) -> None:
    assert split_rows(rows, size, 0, "a").sum() == count


def test_split_depends_on_seed_and_name_only() -> None:
    chosen = split_rows(100, 0.1, 0, "a")
    assert np.array_equal(chosen, split_rows(100, 0.1, 0, "a"))
    assert not np.array_equal(chosen, split_rows(100, 0.1, 0, "b"))
    assert not np.array_equal(chosen, split_rows(100, 0.1, 1, "a"))
