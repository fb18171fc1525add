"""Who does what in which step: the same sets for all world sizes, equal counts, like costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_modules.packing.mixture import Mixture, MixtureConfig
from data_modules.packing.plan import StepPlan, StepSampler, pack_documents, share_out

GLOBAL_BATCH = 24
WORLD_SIZES = (1, 2, 3, 8)
METHODS = st.sampled_from(["multipack", "like_length", "none"])
CAPACITY = 64


def make_plan(lengths: Any, world_size: int, micro: int = 1, **options: Any) -> StepPlan:
    """Plan steps of GLOBAL_BATCH packs over `lengths`, each document once an epoch."""
    array = np.asarray(lengths)
    rows = np.arange(len(array))
    plain = {"capacity": CAPACITY, "method": "multipack", "seed": 0, "num_epochs": 2}
    return StepPlan(
        array,
        array * 0.3,
        lambda epoch: rows,
        micro_batch_size=micro,
        accumulation_steps=GLOBAL_BATCH // world_size // micro,
        world_size=world_size,
        **plain | options,
    )


def step_packs(plan: StepPlan, step: int) -> list[tuple[int, ...]]:
    """Return the packs of a global step over all ranks, without the empty ones, sorted."""
    batches = [b for rank in range(plan.world_size) for b in plan.micro_batches(step, rank)]
    return sorted(tuple(pack.tolist()) for batch in batches for pack in batch.packs if len(pack))


def lognormal(count: int, median: float = 20.0, seed: int = 0) -> Any:
    """Draw lengths such as texts have, from 1 to CAPACITY."""
    drawn = np.random.default_rng(seed).lognormal(np.log(median), 1.0, count)
    return np.clip(drawn.astype(np.int64), 1, CAPACITY)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, CAPACITY), min_size=1, max_size=300),
    METHODS,
    st.integers(0, 5),
    st.one_of(st.none(), st.integers(1, 100)),
    st.booleans(),
    st.sampled_from([1, 3]),
)
def test_plan_is_the_same_at_every_world_size(
    lengths: list[int], method: str, seed: int, window: int | None, is_mixed: bool, micro: int
) -> None:
    datasets = np.arange(len(lengths)) % 3 if is_mixed else None
    options = {"method": method, "seed": seed, "window": window, "datasets": datasets}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data_modules.packing.plan.BLOCK_PACKS", 4)
        plans = [make_plan(lengths, world, micro, **options) for world in WORLD_SIZES]
    assert len({plan.num_steps for plan in plans}) == 1
    seen: list[int] = []
    for step in range(plans[0].num_steps):
        packs = [step_packs(plan, step) for plan in plans]
        assert packs.count(packs[0]) == len(plans)
        assert len({plan.step_weight(step) for plan in plans}) == 1
        documents = [document for pack in packs[0] for document in pack]
        assert plans[0].step_weight(step) == pytest.approx(
            sum(lengths[document] for document in documents) * 0.3
        )
        assert all(sum(lengths[document] for document in pack) <= CAPACITY for pack in packs[0])
        seen += documents
    count = len(lengths)
    for epoch in range(2):
        assert sorted(seen[epoch * count : (epoch + 1) * count]) == list(range(count))
    for plan in plans:
        batches = [list(StepSampler(plan, rank)) for rank in range(plan.world_size)]
        assert {len(own) for own in batches} == {plan.num_steps * plan.accumulation_steps}
        assert {len(batch.packs) for own in batches for batch in own} == {micro}


@pytest.mark.parametrize("micro", [1, 3])
def test_seek_gives_what_iterating_gives(micro: int) -> None:
    plan = make_plan(lognormal(2000), 2, micro, num_epochs=3)

    def flat(first: int) -> list[list[list[int]]]:
        return [[p.tolist() for p in b.packs] for b in StepSampler(plan, 1, first)]

    everything = flat(0)
    for first in (0, 1, plan.num_steps // 2, plan.num_steps - 1, plan.num_steps):
        assert flat(first) == everything[first * plan.accumulation_steps :]
        assert len(StepSampler(plan, 1, first)) == len(flat(first))


def test_steps_by_max_steps_plan_only_the_epochs_that_are_asked_for() -> None:
    requested: list[int] = []
    lengths = lognormal(400)

    def rows(epoch: int) -> Any:
        requested.append(epoch)
        return np.arange(len(lengths))

    plan = StepPlan(
        lengths,
        lengths * 1.0,
        rows,
        capacity=CAPACITY,
        method="multipack",
        seed=0,
        micro_batch_size=4,
        accumulation_steps=1,
        world_size=1,
        max_steps=10_000,
    )
    assert plan.num_steps == 10_000 and not requested
    plan.micro_batches(0, 0)
    assert requested == [0]
    last = plan.micro_batches(9_999, 0)
    assert [p.tolist() for b in StepSampler(plan, 0, 9_999) for p in b.packs] == [
        p.tolist() for b in last for p in b.packs
    ]


def test_window_of_the_plan_is_that_of_the_packs() -> None:
    lengths = lognormal(400)
    plan = make_plan(lengths, 1, num_epochs=1, window=50)
    packs = pack_documents(lengths, CAPACITY, 0, 0, "multipack", window=50)
    planned = [tuple(packs[index].tolist()) for index in range(len(packs))]
    assert sorted(planned) == sorted(
        pack for step in range(plan.num_steps) for pack in step_packs(plan, step)
    )
    whole = pack_documents(lengths, CAPACITY, 0, 0, "multipack")
    assert not np.array_equal(packs.documents, whole.documents)


def rank_costs(plan: StepPlan, lengths: Any) -> Any:
    """Return sum(length^2) of each step and rank [steps, ranks]."""
    return np.array(
        [
            [
                sum(int((lengths[p] ** 2).sum()) for b in plan.micro_batches(s, r) for p in b.packs)
                for r in range(plan.world_size)
            ]
            for s in range(plan.num_steps)
        ]
    )


@pytest.mark.parametrize(
    ("method", "world"),
    [("multipack", 2), ("multipack", 3), ("multipack", 8), ("like_length", 2), ("none", 2)],
)
def test_ranks_have_like_costs(method: str, world: int) -> None:
    lengths = lognormal(6000)
    costs = rank_costs(make_plan(lengths, world, method=method, num_epochs=1), lengths)
    totals = costs.sum(axis=0)
    assert totals.max() / totals.mean() - 1 < 0.01
    # Some rank must do the dearest pack; packs by chance would lag behind more than that.
    assert step_lag(costs) < 0.8 * step_lag(np.random.default_rng(0).permuted(costs, axis=None))


def step_lag(costs: Any) -> float:
    """Return how much more than the mean the slowest rank has to do, over all full steps."""
    full = costs[:-1]
    return float((full.max(axis=1) / full.mean(axis=1) - 1).mean())


def test_a_single_step_is_shared_out_evenly() -> None:
    costs = np.array([[9.0, 8, 7, 6, 5, 4, 3, 2]])
    shares = share_out(costs, 2)
    assert sorted(shares.reshape(-1).tolist()) == list(range(8))
    assert costs[0][shares[0]].sum(axis=1).tolist() == [22, 22]


def test_uneven_steps_are_evened_out_by_later_ones() -> None:
    costs = np.tile([3.0, 1.0], (10, 1))
    shares = share_out(costs, 2)
    assert costs.reshape(-1)[shares].sum(axis=(0, 2)).tolist() == [20, 20]


def test_packs_done_side_by_side_are_alike() -> None:
    lengths = lognormal(6000)
    plan = make_plan(lengths, 8, num_epochs=1)
    apart = []
    for step in range(plan.num_steps - 1):
        ranks = [plan.micro_batches(step, rank) for rank in range(8)]
        costs = np.array([[(lengths[b.packs[0]] ** 2).sum() for b in rank] for rank in ranks])
        apart.append(np.ptp(costs, axis=0).mean() / np.ptp(costs))
    assert np.mean(apart) < 0.5


@pytest.mark.parametrize("method", ["multipack", "like_length", "none"])
@pytest.mark.parametrize("is_mixed", [False, True])
def test_every_document_is_equally_likely_in_every_step(
    method: str, is_mixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chi-square of the steps that the longest, a middle and the shortest document are in."""
    monkeypatch.setattr("data_modules.packing.plan.BLOCK_PACKS", 16)
    lengths = np.sort(lognormal(500))
    datasets = np.arange(len(lengths)) // 100 if is_mixed else None
    seeds, parts = 300, 5
    watched = {0: np.zeros(parts), 250: np.zeros(parts), 499: np.zeros(parts)}
    for seed in range(seeds):
        plan = make_plan(
            lengths, 1, method=method, seed=seed, num_epochs=1, datasets=datasets, window=None
        )
        packs = plan._epoch(0).packs
        pack_of = np.repeat(np.arange(len(packs)), np.diff(packs.starts))
        for document, counts in watched.items():
            pack = pack_of[np.flatnonzero(packs.documents == document)[0]]
            counts[pack * parts // len(packs)] += 1
    expected = seeds / parts
    for counts in watched.values():
        assert ((counts - expected) ** 2 / expected).sum() < 18.5  # p = 0.001, four degrees


@pytest.mark.parametrize("window", [None, 1000])
def test_shares_of_tokens_hold_over_ten_thousand_packs(window: int | None) -> None:
    """Over the whole epoch to a document, and in its first half nearly as well."""
    sizes, requested = (260_000, 20_000, 5_000), (0.6, 0.3, 0.1)
    rng = np.random.default_rng(0)
    lengths = np.concatenate(
        [
            np.clip(rng.lognormal(np.log(median), 0.8, size).astype(np.int64), 1, 256)
            for size, median in zip(sizes, (10, 60, 150), strict=True)
        ]
    )
    datasets = np.repeat(range(3), sizes)
    groups = [np.flatnonzero(datasets == index) for index in range(3)]
    mixture = Mixture(groups, requested, 0, MixtureConfig(weights="tokens"), lengths=lengths)
    plan = StepPlan(
        lengths,
        lengths * 1.0,
        mixture.epoch,
        capacity=256,
        method="multipack",
        seed=0,
        micro_batch_size=8,
        accumulation_steps=1,
        world_size=1,
        window=window,
        datasets=datasets,
    )
    packs = plan._epoch(0).packs
    assert len(packs) > 20_000
    for num_packs in (10_000, len(packs)):
        documents = packs.documents[: packs.starts[num_packs]]
        tokens = np.bincount(datasets[documents], lengths[documents])
        assert tokens / tokens.sum() == pytest.approx(requested, abs=0.001)
