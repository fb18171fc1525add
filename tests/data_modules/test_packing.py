"""The plan of all steps: nothing lost, nothing twice, the same for every number of ranks."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_modules.packing.plan import (
    WORTH_IT,
    MicroBatch,
    StepPlan,
    StepSampler,
    best_fit,
    next_fit,
    pack_documents,
    seeded_generator,
    shard_packs,
    sort_order,
)

LENGTHS = st.lists(st.integers(1, 64), min_size=1, max_size=120)


def make_plan(lengths: list[int], **options: Any) -> StepPlan:
    """Plan steps over `lengths`, each document once an epoch, weight = its length."""
    array = np.array(lengths)
    rows = np.arange(len(lengths))
    settings_ = {
        "capacity": 64,
        "method": "multipack",
        "seed": 0,
        "micro_batch_size": 2,
        "accumulation_steps": 2,
        "world_size": 1,
    } | options
    return StepPlan(array, array.astype(np.float64), lambda epoch: rows, **settings_)


def documents(batches: list[MicroBatch]) -> list[int]:
    """Return the documents of micro-batches in order."""
    return [int(document) for batch in batches for pack in batch.packs for document in pack]


@settings(max_examples=60)
@given(
    LENGTHS,
    st.integers(0, 3),
    st.integers(0, 3),
    st.sampled_from(["multipack", "like_length", "none"]),
)
def test_every_document_is_in_one_pack_that_holds_it(
    lengths: list[int], seed: int, epoch: int, method: str
) -> None:
    array = np.array(lengths)
    packs = pack_documents(array, 64, seed, epoch, method)
    assert sorted(packs.documents.tolist()) == list(range(len(lengths)))
    sizes = [int(array[packs[i]].sum()) for i in range(len(packs))]
    assert all(0 < size <= 64 for size in sizes)
    assert sum(sizes) == sum(lengths)
    if method == "none":
        assert len(packs) == len(lengths)


def test_plan_is_a_function_of_seed_and_epoch() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 300)
    same = [pack_documents(lengths, 64, 1, 0, "multipack") for _ in range(2)]
    assert np.array_equal(same[0].documents, same[1].documents)
    for seed, epoch in ((2, 0), (1, 1)):
        other = pack_documents(lengths, 64, seed, epoch, "multipack")
        assert not np.array_equal(same[0].documents, other.documents)


def test_packs_mix_long_and_short_documents() -> None:
    lengths = np.random.default_rng(0).integers(1, 64, 1000)
    packs = pack_documents(lengths, 256, 0, 0, "multipack")
    spread = np.mean([lengths[packs[i]].std() for i in range(len(packs))])
    assert spread > 0.8 * lengths.std()


def test_packs_left_half_empty_are_anywhere_in_an_epoch() -> None:
    lengths = np.random.default_rng(0).integers(1, 64, 200)
    places = []
    for seed in range(40):
        packs = pack_documents(lengths, 128, seed, 0, "multipack")
        sizes = [lengths[packs[i]].sum() for i in range(len(packs))]
        places.append(int(np.argmin(sizes)) / len(packs))
    assert 0.3 < np.mean(places) < 0.7


def text_lengths(count: int) -> Any:
    """Draw lengths such as texts have, from 1 to 2,048 tokens."""
    drawn = np.random.default_rng(0).lognormal(np.log(150), 1.0, count).astype(np.int64)
    return np.clip(drawn, 1, 2048)


def test_fill_and_time_of_a_large_plan() -> None:
    lengths = text_lengths(100_000)
    start = time.process_time()
    packs = pack_documents(lengths, 4096, 0, 0, "multipack")
    assert time.process_time() - start < 1.0
    assert lengths.sum() / (len(packs) * 4096) > 0.999


def test_documents_without_short_ones_are_packed_as_tightly_as_best_fit_decreasing() -> None:
    lengths = np.random.default_rng(0).integers(300, 600, 20_000)
    packs = pack_documents(lengths, 1000, 0, 0, "multipack")
    decreasing = np.sort(lengths)[::-1]
    rng = np.random.default_rng(0)
    _, tight = best_fit(decreasing, lengths[:0], 1000, rng)
    assert tight <= len(packs) <= tight / WORTH_IT + 1


@settings(max_examples=60)
@given(st.lists(st.integers(1, 40), max_size=80), st.lists(st.integers(0, 39), max_size=10))
def test_best_fit_is_that_of_one_document_after_the_other(
    lengths: list[int], rooms: list[int]
) -> None:
    """Beside a plain best fit: the same number of packs and the same room left in them."""
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


@settings(max_examples=40)
@given(LENGTHS)
def test_next_fit_is_that_of_one_document_after_the_other(lengths: list[int]) -> None:
    starts, room = [], 0
    for index, length in enumerate(lengths):
        if length > room:
            starts.append(index)
            room = 64
        room -= length
    assert next_fit(np.array(lengths), 64).tolist() == starts


@pytest.mark.parametrize("largest", [10, 70_000, 1 << 40])
def test_order_of_keys_is_stable(largest: int) -> None:
    keys = np.random.default_rng(0).integers(0, largest, 3000)
    keys[:50] = keys[0]
    assert sort_order(keys).tolist() == np.argsort(keys, kind="stable").tolist()


@settings(max_examples=40)
@given(LENGTHS, st.integers(1, 130), st.sampled_from(["multipack", "like_length", "none"]))
def test_window_packs_few_documents_at_a_time(lengths: list[int], window: int, method: str) -> None:
    packs = pack_documents(np.array(lengths), 64, 0, 0, method, window=window)
    assert sorted(packs.documents.tolist()) == list(range(len(lengths)))
    order = seeded_generator(0, "packing", 0).permutation(len(lengths))
    window_of = np.argsort(order) // window
    for index in range(len(packs)):
        assert len(set(window_of[packs[index]].tolist())) == 1
        assert np.array(lengths)[packs[index]].sum() <= 64


def test_windows_fill_packs_nearly_as_well() -> None:
    lengths = text_lengths(50_000)
    packs = pack_documents(lengths, 4096, 0, 0, "multipack", window=10_000)
    assert lengths.sum() / (len(packs) * 4096) > 0.995


def test_no_documents_are_no_packs() -> None:
    assert len(pack_documents(np.zeros(0, dtype=np.int64), 64, 0, 0, "multipack")) == 0


def test_document_without_tokens_is_an_error() -> None:
    with pytest.raises(ValueError, match="document 1 has no tokens"):
        pack_documents(np.array([3, 0]), 64, 0, 0, "multipack")


def test_max_steps_repeats_epochs_and_is_exact() -> None:
    lengths = [10] * 30
    epoch = make_plan(lengths, num_epochs=1).num_steps
    for max_steps in (1, epoch, epoch * 3 + 1):
        plan = make_plan(lengths, max_steps=max_steps)
        assert plan.num_steps == max_steps
        assert len(StepSampler(plan, 0)) == max_steps * 2 == len(list(StepSampler(plan, 0)))
    with pytest.raises(IndexError):
        make_plan(lengths, max_steps=3).micro_batches(3, 0)


def test_ends_of_epochs_are_known_by_the_steps_done() -> None:
    epoch = make_plan([10] * 30, num_epochs=1).num_steps
    for plan in (
        make_plan([10] * 30, num_epochs=3),
        make_plan([10] * 30, max_steps=3 * epoch + 1),
    ):
        ends = [step for step in range(plan.num_steps + 1) if plan.ends_epoch(step)]
        assert ends == [epoch, 2 * epoch, 3 * epoch]
    assert make_plan([10] * 30, max_steps=9 * epoch).ends_epoch(7 * epoch)


def test_line_tells_documents_packs_steps_and_epochs() -> None:
    assert make_plan([48] * 10, max_steps=6).line() == (
        "10 documents in 10 packs, 75.0% of 64 tokens full; 3 steps of 4 packs an epoch; "
        "6 steps = 2.00 epochs"
    )
    few = make_plan([48] * 3, micro_batch_size=1, world_size=4, num_epochs=1).line()
    assert few.endswith(
        "3 packs for a global batch of 8: lower trainer.global_batch_size; 1 rank of 4 will have "
        "nothing to do"
    )


def test_last_step_of_an_epoch_is_filled_with_empty_packs() -> None:
    plan = make_plan([64] * 5, num_epochs=2)
    assert plan.num_steps == 4
    sizes = [[len(p) for b in plan.micro_batches(s, 0) for p in b.packs] for s in range(4)]
    assert sizes == [[1, 1, 1, 1], [1, 0, 0, 0]] * 2
    assert plan.step_weight(1) == 64


@pytest.mark.parametrize("world", [1, 2, 3])
def test_validation_shards_hold_each_document_once_in_equal_counts(world: int) -> None:
    packs = pack_documents(np.full(11, 40), 64, 0, 0, "multipack")
    shards = [shard_packs(packs, 2, world, rank) for rank in range(world)]
    assert len({len(shard) for shard in shards}) == 1
    found = sorted(document for shard in shards for document in documents(shard))
    assert found == list(range(11))


def test_document_above_the_capacity_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"65 tokens .* 64"):
        pack_documents(np.array([3, 65]), 64, 0, 0, "multipack")


def test_like_length_packs_neighbours_and_shuffles_the_packs() -> None:
    lengths = np.random.default_rng(0).integers(5, 120, 1500)
    packs = pack_documents(lengths, 512, 0, 0, "like_length")
    spread = [np.ptp(lengths[packs[pack]]) for pack in range(len(packs))]
    mixed = pack_documents(lengths, 512, 0, 0, "multipack")
    assert np.mean(spread) < 0.1 * np.mean([np.ptp(lengths[mixed[p]]) for p in range(len(mixed))])
    longest = [int(lengths[packs[pack]].max()) for pack in range(len(packs))]
    assert longest != sorted(longest) and longest != sorted(longest, reverse=True)
