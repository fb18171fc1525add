"""How often each row is seen, and which rows are kept for validation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_modules.packing.mixture import (
    Mixture,
    MixtureConfig,
    check_mixture,
    describe_mixture,
)

GROUPS = [np.arange(10), np.arange(10, 31)]
SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=5)


def make_groups(sizes: list[int]) -> list[Any]:
    """Number the rows of data sets of these sizes one after the other."""
    return np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])


def count_seen(mixture: Mixture, epochs: int, num_rows: int) -> Any:
    """Return how often each row is seen in the first epochs."""
    return np.bincount(
        np.concatenate([mixture.epoch(epoch) for epoch in range(epochs)]), minlength=num_rows
    )


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


@settings(max_examples=60, deadline=None)
@given(
    SIZES,
    st.sampled_from(["rows", "tokens"]),
    st.sampled_from(["all", "first"]),
    st.one_of(st.none(), st.floats(0.5, 10)),
    st.integers(0, 3),
    st.integers(1, 6),
)
def test_shares_are_those_requested(
    sizes: list[int], kind: str, stop: str, temperature: float | None, seed: int, epochs: int
) -> None:
    """Within the rounding to whole documents, which later epochs make good."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 50, sum(sizes))
    weights = rng.uniform(0.2, 3.0, len(sizes)).tolist()
    groups = make_groups(sizes)
    config = MixtureConfig(weights=kind, temperature=temperature, stop=stop)
    mixture = Mixture(groups, weights, seed, config, lengths=lengths)
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


def test_temperature_one_is_every_row_once() -> None:
    for kind in ("rows", "tokens"):
        config = MixtureConfig(weights=kind, temperature=1.0)
        mixture = Mixture(GROUPS, [1, 1], 0, config, lengths=np.arange(1, 32))
        assert sorted(mixture.epoch(0).tolist()) == list(range(31))


def test_temperature_makes_shares_more_equal() -> None:
    groups = make_groups([10, 1000])
    shares = []
    for temperature in (1.0, 2.0, 1e9):
        mixture = Mixture(groups, [1, 1], 0, MixtureConfig(weights="rows", temperature=temperature))
        shares.append(mixture.report(["a", "b"])[0].share_of_rows)
    assert shares == pytest.approx([10 / 1010, 0.1 / 1.1, 0.5], abs=2e-3)


def test_tokens_are_shared_where_rows_differ_in_length() -> None:
    groups = make_groups([5000, 400])
    lengths = np.concatenate([np.full(5000, 20), np.full(400, 700)])
    mixture = Mixture(groups, [7, 3], 0, MixtureConfig(weights="tokens"), lengths=lengths)
    short, long = mixture.report(["short", "long"])
    assert (short.requested, long.requested) == pytest.approx((0.7, 0.3))
    assert (short.share_of_tokens, long.share_of_tokens) == pytest.approx((0.7, 0.3), abs=1e-3)
    assert long.epochs == 1.0 and long.rows_seen == 400
    assert short.tokens_seen == pytest.approx(280_000 * 7 / 3, abs=20)
    assert short.epochs == pytest.approx(short.rows_seen / 5000)


def test_small_weight_is_seen_in_the_first_epoch() -> None:
    mixture = Mixture(GROUPS, [0.01, 1.0], 0)
    assert [sum(mixture.epoch(epoch) < 10) for epoch in range(11)] == [1, *[0] * 9, 1]


@pytest.mark.parametrize("kind", ["epochs", "rows", "tokens"])
@pytest.mark.parametrize("weight", [1e-9, 1e-300])
def test_the_smallest_weight_gives_one_row(kind: str, weight: float) -> None:
    """Also where no data set has a larger one."""
    config = MixtureConfig(weights=kind, stop="all" if kind == "epochs" else "first")
    mixture = Mixture(GROUPS, [weight, 1.0], 0, config, lengths=np.full(31, 7))
    assert [sum(mixture.epoch(epoch) < 10) for epoch in range(4)] == [1, 0, 0, 0]
    alone = Mixture(GROUPS[:1], [weight], 0, lengths=np.full(31, 7))
    assert [len(alone.epoch(epoch)) for epoch in range(3)] == [1, 0, 0]


def test_data_set_without_rows_or_weight_gives_nothing() -> None:
    groups = [np.arange(10), np.zeros(0, dtype=np.int64), np.arange(10, 20)]
    for kind in ("epochs", "rows", "tokens"):
        config = MixtureConfig(weights=kind)
        mixture = Mixture(groups, [1.0, 1.0, 0.0], 0, config, lengths=np.full(20, 3))
        assert sorted(mixture.epoch(0).tolist()) == list(range(10))
        assert [row.rows_seen for row in mixture.report("abc")] == [10, 0, 0]


def test_nothing_to_mix_is_an_error() -> None:
    with pytest.raises(ValueError, match="no data set has both rows and a weight"):
        Mixture(GROUPS, [0.0, 0.0], 0, MixtureConfig(weights="rows"))


def test_tokens_need_lengths() -> None:
    with pytest.raises(ValueError, match="need the lengths"):
        Mixture(GROUPS, [1.0, 1.0], 0, MixtureConfig(weights="tokens"))


@pytest.mark.parametrize(
    ("words", "problems"),
    [
        ({}, []),
        ({"weights": "rows", "temperature": 2.0, "stop": "first"}, []),
        ({"weights": "token"}, ["data.mixture.weights is 'token'; use epochs or rows or tokens"]),
        (
            {"weights": "rows", "stop": "last", "temperature": 0.0},
            [
                "data.mixture.stop is 'last'; use all or first",
                "data.mixture.temperature is 0.0; use a number above 0, or null",
            ],
        ),
        (
            {"temperature": 2.0},
            [
                "data.mixture.temperature is 2.0, but with data.mixture.weights=epochs there are "
                "no shares; set data.mixture.weights=tokens or rows"
            ],
        ),
    ],
)
def test_problems_of_the_settings(words: dict[str, Any], problems: list[str]) -> None:
    assert check_mixture(MixtureConfig(**words)) == problems


def test_report_is_a_table() -> None:
    lengths = np.full(31, 100)
    mixture = Mixture(GROUPS, [1, 3], 0, MixtureConfig(weights="tokens"), lengths=lengths)
    assert describe_mixture(mixture.report(["lists", "orders"])) == [
        "data set  rows  tokens  epochs  rows seen  of rows  of tokens  requested",
        "lists       10   1,000       1         10   25.00%     25.00%     25.00%",
        "orders      21   2,100    1.43         30   75.00%     75.00%     75.00%",
    ]


@pytest.mark.parametrize(("times", "is_said"), [(4, False), (5, True)])
def test_a_data_set_that_repeats_for_its_share_is_named(times: int, is_said: bool) -> None:
    groups = make_groups([10, 10 * times])
    report = Mixture(groups, [1, 1], 0, MixtureConfig(weights="rows")).report(["small", "large"])
    last = describe_mixture(report)[-1]
    assert last.startswith("warning: ") == is_said
    assert (f"small {times} times; data.mixture.stop=first" in last) == is_said
    # The first one ends the epoch, and a weight in epochs was meant.
    for config in (MixtureConfig(weights="rows", stop="first"), MixtureConfig()):
        report = Mixture(groups, [9, 1], 0, config).report(["small", "large"])
        assert not describe_mixture(report)[-1].startswith("warning")
