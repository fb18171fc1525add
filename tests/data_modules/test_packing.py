"""Packs and steps: every document exactly once, for any number of ranks, with balanced costs."""

from __future__ import annotations

import time
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_modules.packing import (
    MicroBatch,
    Mixture,
    StepPlan,
    StepSampler,
    best_fit,
    pack_documents,
    seeded_generator,
    shard_packs,
    share_out,
    sort_order,
)
from data_modules.settings import MixtureConfig
from data_modules.types import BatchSpec

CAPACITY = 64
BATCHING = [field.name for field in fields(BatchSpec)]
GLOBAL_BATCH = 24
WORLD_SIZES = (1, 2, 3, 8)
METHODS = st.sampled_from(["multipack", "like_length", "none"])
LENGTHS = st.lists(st.integers(1, 64), min_size=1, max_size=120)


def make_plan(lengths: Any, **options: Any) -> StepPlan:
    """Plan steps over `lengths`, each document once an epoch, weight = 0.3 of its length."""
    array = np.asarray(lengths)
    rows = np.arange(len(array))
    given = {"micro_batch_size": 2, "accumulation_steps": 2} | options
    batching = BatchSpec(**{name: given.pop(name) for name in BATCHING if name in given})
    packing = {"capacity": CAPACITY, "method": "multipack", "seed": 0} | given
    return StepPlan(array, array * 0.3, lambda epoch: rows, batching, **packing)


def lognormal(count: int, median: float = 20.0, most: int = CAPACITY) -> Any:
    """Draw lengths from 1 to `most`, distributed as those of texts."""
    drawn = np.random.default_rng(0).lognormal(np.log(median), 1.0, count)
    return np.clip(drawn.astype(np.int64), 1, most)


def documents(batches: list[MicroBatch]) -> list[int]:
    """Return the documents of micro-batches in order."""
    return [int(document) for batch in batches for pack in batch.packs for document in pack]


def test_plan_is_a_function_of_seed_and_epoch() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 300)
    one, same, *others = (
        pack_documents(lengths, 64, seed, epoch, "multipack").documents.tolist()
        for seed, epoch in ((1, 0), (1, 0), (2, 0), (1, 1))
    )
    assert one == same and one not in others


@pytest.mark.parametrize(("window", "fill"), [(None, 0.999), (10_000, 0.995)])
def test_fill_and_time_of_a_large_plan(window: int | None, fill: float) -> None:
    lengths = lognormal(50_000, 150, 2048)
    start = time.process_time()
    packs = pack_documents(lengths, 4096, 0, 0, "multipack", window=window)
    assert time.process_time() - start < 1.0
    assert lengths.sum() / (len(packs) * 4096) > fill


def test_packs_mix_long_and_short_documents_and_are_tight_without_short_ones() -> None:
    lengths = np.random.default_rng(0).integers(1, 64, 1000)
    packs = pack_documents(lengths, 256, 0, 0, "multipack")
    spread = np.mean([lengths[packs[i]].std() for i in range(len(packs))])
    assert spread > 0.8 * lengths.std()
    alike = np.random.default_rng(0).integers(300, 600, 20_000)
    assert alike.sum() / (1000 * len(pack_documents(alike, 1000, 0, 0, "multipack"))) > 0.95


@settings(max_examples=60)
@given(st.lists(st.integers(1, 40), max_size=80), st.lists(st.integers(0, 39), max_size=10))
def test_best_fit_equals_the_sequential_algorithm(lengths: list[int], rooms: list[int]) -> None:
    """Compared with a simple implementation: as many packs, with the same free space."""
    decreasing = sorted(lengths, reverse=True)
    plain = list(rooms)
    for length in decreasing:
        fitting = [room for room in plain if room >= length]
        room = min(fitting, default=40)
        if fitting:
            plain.remove(room)
        plain.append(room - length)
    rng = np.random.default_rng(0)
    ours, num_packs = best_fit(
        np.array(decreasing, dtype=np.int64), np.array(rooms, dtype=np.int64), 40, rng
    )
    left = np.array([*rooms, *[40] * (num_packs - len(rooms))])
    np.subtract.at(left, ours, decreasing)
    assert sorted(left.tolist()) == sorted(plain)


def test_order_of_keys_is_stable() -> None:
    for largest in (10, 70_000, 1 << 40):
        keys = np.random.default_rng(0).integers(0, largest, 3000)
        keys[:50] = keys[0]
        assert sort_order(keys).tolist() == np.argsort(keys, kind="stable").tolist()


@settings(max_examples=40)
@given(LENGTHS, st.integers(1, 130), METHODS)
def test_window_packs_few_documents_at_a_time(lengths: list[int], window: int, method: str) -> None:
    packs = pack_documents(np.array(lengths), 64, 0, 0, method, window=window)
    assert sorted(packs.documents.tolist()) == list(range(len(lengths)))
    order = seeded_generator(0, "packing", 0).permutation(len(lengths))
    window_of = np.argsort(order) // window
    for index in range(len(packs)):
        assert len(set(window_of[packs[index]].tolist())) == 1
        assert np.array(lengths)[packs[index]].sum() <= 64


def test_documents_that_cannot_be_packed_are_an_error() -> None:
    assert len(pack_documents(np.zeros(0, dtype=np.int64), 64, 0, 0, "multipack")) == 0
    with pytest.raises(ValueError, match="document 1 has no tokens"):
        pack_documents(np.array([3, 0]), 64, 0, 0, "multipack")
    with pytest.raises(ValueError, match=r"65 tokens .* 64"):
        pack_documents(np.array([3, 65]), 64, 0, 0, "multipack")


def test_max_steps_repeats_epochs_and_is_exact() -> None:
    lengths = [10] * 30
    epoch = make_plan(lengths, num_epochs=1).num_steps
    for max_steps in (1, epoch, epoch * 3 + 1):
        plan = make_plan(lengths, max_steps=max_steps)
        assert plan.num_steps == max_steps
        assert len(StepSampler(plan, 0)) == max_steps * 2 == len(list(StepSampler(plan, 0)))
    with pytest.raises(IndexError):
        plan.micro_batches(plan.num_steps, 0)


def test_completed_epochs_follow_from_the_steps_done() -> None:
    epoch = make_plan([10] * 30, num_epochs=1).num_steps
    for most in ({"num_epochs": 3}, {"max_steps": 3 * epoch + 1}):
        plan = make_plan([10] * 30, **most)
        ends = [step for step in range(plan.num_steps + 1) if plan.ends_epoch(step)]
        assert ends == [epoch, 2 * epoch, 3 * epoch]


def test_the_summary_has_documents_packs_steps_and_epochs() -> None:
    assert make_plan([48] * 10, max_steps=6).line() == (
        "10 documents in 10 packs, 75.0 % of 64 tokens full; 3 steps of 4 packs an epoch; "
        "6 steps = 2.00 epochs"
    )
    assert make_plan([48] * 10, num_epochs=1).summary().startswith("3 steps of 4 packs, 1 epoch, ")
    for documents, micro, accumulation, ranks, end in (
        (3, 1, 2, 4, "1 rank of 4 will have nothing to do"),
        (60, 1, 64, 1, ": type trainer.gradient_accumulation_steps=6"),
        (3, 4, 1, 1, "3 packs for a global batch of 4: type trainer.micro_batch_size=1"),
    ):
        batching = {"micro_batch_size": micro, "accumulation_steps": accumulation}
        plan = make_plan([48] * documents, num_ranks=ranks, num_epochs=1, **batching)
        assert plan.line().endswith(end)


def test_last_step_of_an_epoch_is_filled_with_empty_packs() -> None:
    assert make_plan([64] * 5, accumulation_steps=64, num_epochs=1).num_steps == 1
    plan = make_plan([64] * 5, num_epochs=2)
    assert plan.num_steps == 4
    sizes = [[len(p) for b in plan.micro_batches(s, 0) for p in b.packs] for s in range(4)]
    assert sizes == [[1, 1, 1, 1], [1, 0, 0, 0]] * 2
    assert plan.micro_batches(1, 0)[0].step_weight == pytest.approx(19.2)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_validation_shards_hold_each_document_once_in_equal_counts(world: int) -> None:
    packs = pack_documents(np.full(11, 40), 64, 0, 0, "multipack")
    shards = [shard_packs(packs, 2, world, rank) for rank in range(world)]
    assert len({len(shard) for shard in shards}) == 1
    found = sorted(document for shard in shards for document in documents(shard))
    assert found == list(range(11))


def test_similar_length_method_packs_neighbours_and_shuffles_packs() -> None:
    lengths = np.random.default_rng(0).integers(5, 120, 1500)
    packs = pack_documents(lengths, 512, 0, 0, "like_length")
    spread = [np.ptp(lengths[packs[pack]]) for pack in range(len(packs))]
    mixed = pack_documents(lengths, 512, 0, 0, "multipack")
    assert np.mean(spread) < 0.1 * np.mean([np.ptp(lengths[mixed[p]]) for p in range(len(mixed))])
    longest = [int(lengths[packs[pack]].max()) for pack in range(len(packs))]
    assert longest != sorted(longest) and longest != sorted(longest, reverse=True)


def plan_of(lengths: Any, world_size: int, micro: int = 1, **options: Any) -> StepPlan:
    """Plan steps of GLOBAL_BATCH packs over `lengths`, each document once an epoch."""
    accumulation = GLOBAL_BATCH // world_size // micro
    batching = {"micro_batch_size": micro, "accumulation_steps": accumulation, "num_epochs": 2}
    return make_plan(lengths, num_ranks=world_size, **batching | options)


def step_packs(plan: StepPlan, step: int) -> list[tuple[int, ...]]:
    """Return the packs of a global step over all ranks, without the empty ones, sorted."""
    batches = [b for rank in range(plan.world_size) for b in plan.micro_batches(step, rank)]
    return sorted(tuple(pack.tolist()) for batch in batches for pack in batch.packs if len(pack))


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
        patch.setattr("data_modules.packing.BLOCK_PACKS", 4)
        worlds = [world for world in WORLD_SIZES if GLOBAL_BATCH % (world * micro) == 0]
        plans = [plan_of(lengths, world, micro, **options) for world in worlds]
    assert len({plan.num_steps for plan in plans}) == 1
    seen: list[int] = []
    for step in range(plans[0].num_steps):
        packs = [step_packs(plan, step) for plan in plans]
        assert packs.count(packs[0]) == len(plans)
        assert len({plan.micro_batches(step, 0)[0].step_weight for plan in plans}) == 1
        documents = [document for pack in packs[0] for document in pack]
        assert plans[0].micro_batches(step, 0)[0].step_weight == pytest.approx(
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
    plan = plan_of(lognormal(2000), 2, micro, num_epochs=3)

    def flat(first: int) -> list[list[list[int]]]:
        return [[p.tolist() for p in b.packs] for b in StepSampler(plan, 1, first)]

    everything = flat(0)
    for first in (0, 1, plan.num_steps // 2, plan.num_steps - 1, plan.num_steps):
        assert flat(first) == everything[first * plan.accumulation_steps :]
        assert len(StepSampler(plan, 1, first)) == len(flat(first))


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
    ("method", "world"), [("multipack", 3), ("multipack", 8), ("like_length", 2), ("none", 2)]
)
def test_ranks_have_similar_costs(method: str, world: int) -> None:
    lengths = lognormal(6000)
    costs = rank_costs(plan_of(lengths, world, method=method, num_epochs=1), lengths)
    totals = costs.sum(axis=0)
    assert totals.max() / totals.mean() - 1 < 0.01
    # Some rank must do the dearest pack; packs by chance would lag behind more than that.
    assert step_lag(costs) < 0.8 * step_lag(np.random.default_rng(0).permuted(costs, axis=None))


def step_lag(costs: Any) -> float:
    """Return the cost of the slowest rank relative to the mean, over all full steps."""
    full = costs[:-1]
    return float((full.max(axis=1) / full.mean(axis=1) - 1).mean())


def test_shares_are_balanced_within_a_step_and_over_steps() -> None:
    costs = np.array([[9.0, 8, 7, 6, 5, 4, 3, 2]])
    shares = share_out(costs, 2)
    assert sorted(shares.reshape(-1).tolist()) == list(range(8))
    assert costs[0][shares[0]].sum(axis=1).tolist() == [22, 22]
    costs = np.tile([3.0, 1.0], (10, 1))
    assert costs.reshape(-1)[share_out(costs, 2)].sum(axis=(0, 2)).tolist() == [20, 20]


@pytest.mark.parametrize(
    ("method", "is_mixed"),
    [("multipack", False), ("multipack", True), ("like_length", True), ("none", False)],
)
def test_every_document_is_equally_likely_in_every_step(
    method: str, is_mixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chi-squared test of the steps of the longest, a median and the shortest document."""
    monkeypatch.setattr("data_modules.packing.BLOCK_PACKS", 16)
    lengths = np.sort(lognormal(500))
    datasets = np.arange(len(lengths)) // 100 if is_mixed else None
    seeds, parts = 150, 5
    watched = {0: np.zeros(parts), 250: np.zeros(parts), 499: np.zeros(parts)}
    for seed in range(seeds):
        plan = plan_of(
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
    """Exact over the whole epoch, approximate in its first half."""
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
    mixture = Mixture(groups, requested, 0, MixtureConfig(weights="tokens"), lengths)
    plan = StepPlan(
        lengths,
        lengths * 1.0,
        mixture.epoch,
        BatchSpec(micro_batch_size=8),
        capacity=256,
        method="multipack",
        seed=0,
        window=window,
        datasets=datasets,
    )
    packs = plan._epoch(0).packs
    assert len(packs) > 20_000
    for num_packs in (10_000, len(packs)):
        documents = packs.documents[: packs.starts[num_packs]]
        tokens = np.bincount(datasets[documents], lengths[documents])
        assert tokens / tokens.sum() == pytest.approx(requested, abs=0.001)
