"""The mixture: how often each row is seen, and which rows are held out."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import DataError
from data_modules.packing import Mixture, describe_mixture
from data_modules.settings import DataConfig, DatasetConfig, MixtureConfig, check_datasets
from data_modules.tokens.datasets import Sides, hold_out

GROUPS = [np.arange(10), np.arange(10, 31)]
SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=5)


def make_groups(sizes: list[int]) -> list[Any]:
    """Return consecutive row numbers for data sets of these sizes."""
    return np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])


def mix(
    groups: list[Any], given: list[float], seed: int = 0, *, tokens: int = 7, **settings: Any
) -> Mixture:
    """Mix rows of `tokens` tokens each."""
    return Mixture(groups, given, seed, MixtureConfig(**settings), np.full(100, tokens))


def count_seen(mixture: Mixture, epochs: int, num_rows: int) -> Any:
    """Return how often each row is seen in the first epochs."""
    return np.bincount(
        np.concatenate([mixture.epoch(epoch) for epoch in range(epochs)]), minlength=num_rows
    )


@pytest.mark.parametrize(("weight", "seen"), [(1.0, {1}), (2.0, {2}), (2.5, {2, 3}), (0.5, {0, 1})])
def test_weight_is_the_number_of_times_a_row_is_seen(weight: float, seen: set[int]) -> None:
    rows = mix(GROUPS, [weight, 1.0]).epoch(0)
    counts = np.bincount(rows, minlength=31)
    assert set(counts[:10].tolist()) == seen
    assert counts[:10].sum() == weight * 10
    assert set(counts[10:].tolist()) == {1}


def test_a_fractional_weight_continues_in_the_next_epoch() -> None:
    mixture = mix(GROUPS, [0.3, 1.0])
    parts = [mixture.epoch(epoch) for epoch in range(10)]
    counts = np.bincount(np.concatenate(parts), minlength=31)
    assert set(counts[:10].tolist()) == {3}
    assert not np.array_equal(np.sort(parts[0]), np.sort(parts[1]))
    assert np.array_equal(parts[3], mix(GROUPS, [0.3, 1.0]).epoch(3))
    assert not np.array_equal(parts[3], mix(GROUPS, [0.3, 1.0], 1).epoch(3))


@settings(max_examples=60, deadline=None)
@given(
    SIZES,
    st.sampled_from(["rows", "tokens"]),
    st.sampled_from(["all", "first"]),
    st.one_of(st.none(), st.floats(0.5, 10)),
    st.integers(0, 3),
    st.integers(1, 6),
)
def test_shares_match_the_requested_ones(
    sizes: list[int], kind: str, stop: str, temperature: float | None, seed: int, epochs: int
) -> None:
    """Up to rounding to whole documents, which later epochs correct."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 50, sum(sizes))
    weights = rng.uniform(0.2, 3.0, len(sizes)).tolist()
    groups = make_groups(sizes)
    config = MixtureConfig(weights=kind, temperature=temperature, stop=stop)
    mixture = Mixture(groups, weights, seed, config, lengths)
    units = lengths if kind == "tokens" else np.ones_like(lengths)
    size = np.array([units[group].sum() for group in groups], dtype=float)
    requested = np.array(weights) * (1 if temperature is None else size ** (1 / temperature))
    requested /= requested.sum()
    counts = count_seen(mixture, epochs, len(lengths))
    got = np.array([(counts * units)[group].sum() for group in groups])
    whole = epochs * (max if stop == "all" else min)(size / requested)
    slack = int(units.max()) + 0.01
    assert np.all(got >= requested * whole - 0.01) and np.all(got <= requested * whole + slack)
    assert all(np.ptp(counts[group]) <= 1 for group in groups)
    if stop == "all":
        assert all(mixture.epoch(0)[np.isin(mixture.epoch(0), g)].size >= len(g) for g in groups)
    else:
        assert count_seen(mixture, 1, len(lengths)).max() == 1


@pytest.mark.parametrize("kind", ["epochs", "rows", "tokens"])
@pytest.mark.parametrize("weight", [1e-9, 1e-300])
def test_the_smallest_weight_gives_one_row(kind: str, weight: float) -> None:
    """Also if no data set has a larger weight."""
    mixture = mix(GROUPS, [weight, 1.0], weights=kind, stop="all" if kind == "epochs" else "first")
    assert [sum(mixture.epoch(epoch) < 10) for epoch in range(4)] == [1, 0, 0, 0]
    alone = mix(GROUPS[:1], [weight])
    assert [len(alone.epoch(epoch)) for epoch in range(3)] == [1, 0, 0]


def test_a_data_set_without_rows_or_weight_is_skipped() -> None:
    groups = [np.arange(10), np.zeros(0, dtype=np.int64), np.arange(10, 20)]
    for kind in ("epochs", "rows", "tokens"):
        mixture = mix(groups, [1.0, 1.0, 0.0], weights=kind)
        assert sorted(mixture.epoch(0).tolist()) == list(range(10))
        assert [row.rows_seen for row in mixture.report("abc")] == [10, 0, 0]
    with pytest.raises(DataError, match="no data set has both rows and a weight"):
        mix(GROUPS, [0.0, 0.0], weights="rows")
    without_shares = DataConfig(
        datasets=[DatasetConfig(path="sample:people.json")], mixture=MixtureConfig(temperature=2.0)
    )
    (problem,) = check_datasets(without_shares)
    assert problem.startswith("data.mixture.temperature is 2.0, but with data.mixture.weights=epo")


def test_report_is_a_table() -> None:
    mixture = mix(GROUPS, [1, 3], tokens=100, weights="tokens")
    assert describe_mixture(mixture.report(["lists", "orders"])) == [
        "data set  rows  tokens  epochs  rows seen  of rows  of tokens  requested",
        "lists       10   1,000       1         10  25.00 %    25.00 %    25.00 %",
        "orders      21   2,100    1.43         30  75.00 %    75.00 %    75.00 %",
    ]


def test_a_data_set_repeated_for_its_share_is_named() -> None:
    for times, config, is_named in (
        (4, {"weights": "rows"}, False),
        (5, {"weights": "rows"}, True),
        # The first one ends the epoch, and a weight in epochs was meant.
        (5, {"weights": "rows", "stop": "first"}, False),
        (5, {}, False),
    ):
        groups = make_groups([10, 10 * times])
        weights = [1, 1] if is_named or times == 4 else [9, 1]
        last = describe_mixture(mix(groups, weights, **config).report(["small", "large"]))[-1]
        assert last.startswith("warning: ") == is_named
        assert (f"small {times} times; data.mixture.stop=first" in last) == is_named


def store(contents: list[int], documents_per_row: int = 1) -> Any:
    """Return a store of rows with these contents; each row may be several documents."""
    rows = np.repeat(np.arange(len(contents)), documents_per_row)
    digests = np.repeat(np.array(contents, np.uint64), documents_per_row) * np.uint64(1000)
    digests += np.tile(np.arange(documents_per_row), len(contents)).astype(np.uint64)
    return SimpleNamespace(rows=rows, digests=digests)


def sides_of(*stores: Any, size: float, max_rows: int | None = None, seed: int = 0) -> list[Sides]:
    sources = [
        (one, DatasetConfig(path=f"set{number}", name=f"set{number}", max_rows=max_rows))
        for number, one in enumerate(stores)
    ]
    return hold_out(sources, size, seed)


contents = st.lists(st.integers(0, 30), min_size=1, max_size=40)


@given(
    st.lists(contents, min_size=1, max_size=3),
    st.floats(0, 0.9),
    st.integers(1, 3),
    st.integers(0, 5),
)
def test_no_content_is_on_both_sides(
    sets: list[list[int]], size: float, documents_per_row: int, seed: int
) -> None:
    stores = [store(one, documents_per_row) for one in sets]
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
def test_the_exact_number_of_distinct_rows_is_held_out(
    count: int, requested: int, seed: int
) -> None:
    if requested >= count:
        return
    (side,) = sides_of(store(list(range(count))), size=requested, seed=seed)
    assert side.validation.sum() == requested and side.training.sum() == count - requested


@pytest.mark.parametrize(
    ("contents", "size", "count"),
    [
        *((range(100), 0.05, 5), (range(100), 0, 0), (range(100), 7, 7), (range(3), 0.05, 1)),
        *((range(2), 0.9, 1), (range(1), 0.5, 0), (range(1), 1, 0)),
        # Identical rows stay together.
        ([7] * 20, 0.1, 0),
        ([0] * 900 + list(range(1, 10)), 5, 5),
    ],
)
def test_sizes(contents: Sequence[int], size: float, count: int) -> None:
    for seed in range(3):
        (side,) = sides_of(store(list(contents)), size=size, seed=seed)
        assert side.validation.sum() == count
        assert side.training.sum() == len(contents) - count


def test_holding_out_more_rows_than_exist_is_an_error() -> None:
    with pytest.raises(DataError, match=r"set0: data\.val_set_size=20 leaves none of its 20 rows"):
        sides_of(store(list(range(20))), size=20)


def test_a_row_held_out_in_another_data_set_is_masked() -> None:
    sides = sides_of(store(list(range(20))), store(list(range(20))), size=4)
    repeated = [side.repeated_rows for side in sides]
    assert all(side.validation.sum() == 4 for side in sides)
    assert [int(side.training.sum()) for side in sides] == [16 - count for count in repeated]
    assert sum(repeated) > 0


def test_max_rows_is_a_seeded_choice_of_rows() -> None:
    one = store(list(range(30)), documents_per_row=3)
    (side,) = sides_of(one, size=2, max_rows=10)
    assert len(np.unique(one.rows[side.training])) == 10 and side.training.sum() == 30
    (again,) = sides_of(one, size=2, max_rows=10)
    assert (side.training == again.training).all()
    (other,) = sides_of(one, size=2, max_rows=10, seed=1)
    assert (side.training != other.training).any()


def test_the_choice_depends_on_seed_and_name_only() -> None:
    one = store(list(range(100)))
    chosen, other_name = sides_of(one, one, size=0.1)
    assert (chosen.validation == sides_of(one, size=0.1)[0].validation).all()
    assert (chosen.validation != other_name.validation).any()
    assert (chosen.validation != sides_of(one, size=0.1, seed=1)[0].validation).any()
