"""Which rows are in an epoch, which share a pack, and which step and rank train on them.

The mixture decides how often the rows of several data sets are in an epoch, the plan their order: a
step's documents are a pure function of (lengths, capacity, seed, epoch), independent of the number
of ranks. Never reads a token.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from common.errors import DataError
from common.text import aligned, counted, percent

if TYPE_CHECKING:
    from data_modules.settings import MixtureConfig
    from data_modules.types import BatchSpec

Indices = npt.NDArray[np.int64]
_MIN_STEPS = 10
"""steps of an epoch that small data should have"""
_LIKE_LENGTH_WINDOW = 2000
"""number of shuffled documents that `like_length` sorts by length"""
BLOCK_PACKS = 256
"""packs in a block of the epoch in which every data set has its share of the tokens"""
_SHORT_SHARE = 1.1
"""tokens of short documents reserved to fill the packs, relative to the expected free room"""
_WELL_FILLED = 0.995
"""average fill of the packs below which best fit over all documents is tried"""
_WORTH_IT = 0.995
"""share of the packs that best fit over all documents may need at most to be used"""
_MANY_EPOCHS = 4
"""repetitions of a row in an epoch above which a mixture by shares warns"""


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureRow:
    """One data set's contribution to an epoch.

    `rows` and `tokens` are those of the data set, `rows_seen` and `tokens_seen` those of the epoch;
    `epochs` is how often a row is seen on average. Shares are of the whole epoch; `requested` is
    None with weights in epochs.
    """

    name: str
    rows: int
    tokens: int
    rows_seen: int
    tokens_seen: int
    epochs: float
    share_of_rows: float
    share_of_tokens: float
    requested: float | None

    HEADINGS: ClassVar[tuple[str, ...]] = (
        *("data set", "rows", "tokens", "epochs", "rows seen", "of rows", "of tokens"),
        "requested",
    )

    def cells(self) -> tuple[str, ...]:
        return (
            self.name,
            f"{self.rows:,}",
            f"{self.tokens:,}",
            f"{self.epochs:.3g}",
            f"{self.rows_seen:,}",
            percent(self.share_of_rows, 2),
            percent(self.share_of_tokens, 2),
            "" if self.requested is None else percent(self.requested, 2),
        )


def seeded_generator(seed: int, *keys: object) -> np.random.Generator:
    """Return a random generator that depends only on `seed` and `keys`."""
    digest = hashlib.sha256(repr((seed, *keys)).encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))


class Mixture:
    """The rows of each epoch.

    `groups` are the example indices of each data set, `weights` one number each, `lengths` the
    tokens of each example.

    The rows of a data set are in one fixed seeded order, which is repeated cyclically. An epoch
    continues where the previous one ended, so that all rows are seen equally often (up to one), and
    rounding in one epoch is compensated in the next. A data set without rows or with weight 0
    contributes nothing.
    """

    def __init__(
        self,
        groups: Sequence[Indices],
        weights: Sequence[float],
        seed: int,
        config: MixtureConfig,
        lengths: Indices,
    ) -> None:
        self._config = config
        self._orders = [
            seeded_generator(seed, "mixture", index).permutation(group)
            for index, group in enumerate(groups)
        ]
        self._lengths = lengths
        self._ends = None
        if self._config.weights == "tokens":
            self._ends = [np.cumsum(lengths[order]) for order in self._orders]
        self._shares, self._passes = self._plan([float(weight) for weight in weights])

    def epoch(self, number: int) -> Indices:
        """Return the example indices of epoch `number` (from 0), int64 [rows seen]."""
        return np.concatenate([self._seen(index, number) for index in range(len(self._orders))])

    def report(self, names: Sequence[str], number: int = 0) -> list[MixtureRow]:
        """Return each data set's contribution to epoch `number`."""
        seen = [self._seen(index, number) for index in range(len(self._orders))]
        tokens_seen = [self._count_tokens(rows) for rows in seen]
        all_rows = max(1, sum(map(len, seen)))
        all_tokens = max(1, sum(tokens_seen))
        return [
            MixtureRow(
                name=name,
                rows=len(order),
                tokens=self._count_tokens(order),
                rows_seen=len(rows),
                tokens_seen=tokens,
                epochs=len(rows) / max(1, len(order)),
                share_of_rows=len(rows) / all_rows,
                share_of_tokens=tokens / all_tokens,
                requested=None if self._shares is None else self._shares[index],
            )
            for index, (name, order, rows, tokens) in enumerate(
                zip(names, self._orders, seen, tokens_seen, strict=True)
            )
        ]

    def _plan(self, weights: list[float]) -> tuple[list[float] | None, list[float]]:
        """Return the requested shares, and how often a row of each data set is seen in an epoch."""
        kind, temperature = self._config.weights, self._config.temperature
        if kind == "epochs":
            return None, weights
        sizes = [
            self._count_tokens(order) if kind == "tokens" else len(order) for order in self._orders
        ]
        parts = [
            (weight if temperature is None else weight * size ** (1 / temperature)) if size else 0.0
            for weight, size in zip(weights, sizes, strict=True)
        ]
        if not sum(parts):
            raise DataError("no data set has both rows and a weight above 0")
        shares = [part / sum(parts) for part in parts]
        whole = [size / share for size, share in zip(sizes, shares, strict=True) if share]
        total = max(whole) if self._config.stop == "all" else min(whole)
        return shares, [
            share * total / size if size else 0.0 for share, size in zip(shares, sizes, strict=True)
        ]

    def _seen(self, index: int, number: int) -> Indices:
        order = self._orders[index]
        if not len(order):
            return order
        first, last = self._position(index, number), self._position(index, number + 1)
        rounds = [order] * (last // len(order) - first // len(order) + 1)
        start = first % len(order)
        return np.concatenate(rounds)[start : start + last - first]

    def _position(self, index: int, number: int) -> int:
        """Return the number of rows of a data set that are seen before epoch `number`."""
        size = len(self._orders[index])
        if not number or not self._passes[index]:
            return 0
        # Rounded because 3 * 0.1 is slightly more than 0.3; then up, to at least one row, so that
        # the first epoch has a row of every data set.
        passes = number * self._passes[index]
        if self._ends is None:
            return max(1, math.ceil(round(passes * size, 6)))
        ends = self._ends[index]
        whole, target = divmod(round(passes * int(ends[-1]), 3), int(ends[-1]))
        rest = int(np.searchsorted(ends, target)) + 1 if target > 0 else 0
        return max(1, int(whole) * size + rest)

    def _count_tokens(self, rows: Indices) -> int:
        return int(self._lengths[rows].sum())


def describe_mixture(rows: Sequence[MixtureRow]) -> list[str]:
    """Format the report as a table with a line per data set.

    A last line warns of data sets that are repeated more than `_MANY_EPOCHS` times.
    """
    lines = aligned([MixtureRow.HEADINGS, *(row.cells() for row in rows)])
    repeated = [row for row in rows if row.requested is not None and row.epochs > _MANY_EPOCHS]
    if repeated:
        named = ", ".join(f"{row.name} {row.epochs:.3g} times" for row in repeated)
        lines.append(
            f"warning: to reach their shares, rows are repeated within an epoch: {named}; "
            "data.mixture.stop=first ends an epoch before a data set repeats"
        )
    return lines


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The documents of one rank's micro-batch: an array of example indices per pack."""

    packs: tuple[Indices, ...]
    step_weight: float


@dataclass(frozen=True, slots=True)
class _EpochPlan:
    """The packs of an epoch and their ranks: `shares` int64 [steps, ranks, packs]."""

    packs: Packs
    shares: Indices
    step_weights: npt.NDArray[np.float64]


class StepPlan:
    """The plan of all global steps of a run, over all its epochs.

    A global step has `micro_batch_size * accumulation_steps * num_ranks` packs; its documents
    depend only on that product. The last step of an epoch is filled up with empty packs, so every
    rank has the same number of micro-batches and every accumulation window is full. Ranks get
    similar shares of sum(length^2), the cost of attention: packs processed at the same time on
    different ranks are as similar as the step allows, and so are the ranks' totals in a step and
    over the epoch.

    `epoch_rows(epoch)` returns the example indices of an epoch. With `max_steps`, epochs repeat
    until there are that many steps; else there are `num_epochs`. `window` and `datasets` (the data
    set of each example) are passed to `pack_documents`.
    """

    def __init__(
        self,
        lengths: Indices,
        label_weights: npt.NDArray[np.float64],
        epoch_rows: Callable[[int], Indices],
        batching: BatchSpec,
        *,
        capacity: int,
        method: str,
        seed: int,
        window: int | None = None,
        datasets: Indices | None = None,
    ) -> None:
        if not len(lengths):
            raise ValueError("no documents to plan steps for")
        self._lengths, self._label_weights = lengths, label_weights
        self._epoch_rows, self._datasets = epoch_rows, datasets
        self._capacity, self._method, self._seed = capacity, method, seed
        self._window = window
        self.micro_batch_size = batching.micro_batch_size
        self.accumulation_steps = batching.accumulation_steps
        self.world_size = batching.num_ranks
        self.packs_per_step = self.micro_batch_size * self.accumulation_steps * self.world_size
        self._epoch = lru_cache(maxsize=2)(self._plan_epoch)
        self._first_steps = [0]
        if batching.max_steps is None:
            while len(self._first_steps) <= batching.num_epochs:
                self._count_another_epoch()
        most = batching.max_steps
        self.num_steps = self._first_steps[-1] if most is None else most

    def line(self) -> str:
        """Describe the packs and steps of the first epoch, and the number of steps."""
        packs, steps = self._epoch(0).packs, len(self._epoch(0).step_weights)
        line = (
            f"{counted(len(packs.documents), 'document')} in {counted(len(packs), 'pack')}, "
            f"{percent(self._fill)} of {self._capacity:,} tokens full; "
            f"{counted(steps, 'step')} of {counted(self.packs_per_step, 'pack')} an epoch"
        )
        if self.num_steps != steps:
            line += f"; {counted(self.num_steps, 'step')} = {self.num_steps / steps:.2f} epochs"
        return line + self._remarks()

    def summary(self) -> str:
        """Describe the number of steps and packs in half a line."""
        packs, epoch_steps = counted(self.packs_per_step, "pack"), len(self._epoch(0).step_weights)
        epochs = f"{self.num_steps / epoch_steps:.3g}"
        line = (
            f"{counted(self.num_steps, 'step')} of {packs}, {epochs} epoch{'s' * (epochs != '1')}"
        )
        return f"{line}, packs {percent(self._fill)} full{self._remarks()}"

    @property
    def _fill(self) -> float:
        packs = self._epoch(0).packs
        return int(self._lengths[packs.documents].sum()) / (len(packs) * self._capacity)

    def _remarks(self) -> str:
        packs, remarks = len(self._epoch(0).packs), ""
        if packs < self.packs_per_step:
            remarks += f"; {counted(packs, 'pack')} for a global batch of {self.packs_per_step:,}"
            if (fewer := self.accumulation_for_small_data()) < self.accumulation_steps:
                remarks += f": type trainer.gradient_accumulation_steps={fewer}"
            elif self.micro_batch_size > 1:
                remarks += ": type trainer.micro_batch_size=1"
        if (idle := self.world_size - packs) > 0:
            remarks += f"; {counted(idle, 'rank')} of {self.world_size} will have nothing to do"
        return remarks

    def accumulation_for_small_data(self) -> int:
        """Return as many accumulation steps as leave the first epoch _MIN_STEPS steps, or 1."""
        packs = len(self._epoch(0).packs)
        at_once = self.micro_batch_size * self.world_size
        return fit_accumulation(self.accumulation_steps, packs, at_once)

    def ends_epoch(self, step: int) -> bool:
        while self._first_steps[-1] < step:
            self._count_another_epoch()
        return step in self._first_steps[1:]

    def epoch_at(self, step: int) -> float:
        """Return how many epochs `step` steps are, by the length of the first one."""
        self.ends_epoch(1)  # counts the steps of the first epoch
        return step / self._first_steps[1]

    def micro_batches(self, step: int, rank: int) -> list[MicroBatch]:
        """Return the `accumulation_steps` micro-batches of `rank` in a global step."""
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step {step} of {self.num_steps}")
        while self._first_steps[-1] <= step:
            self._count_another_epoch()
        number = bisect_right(self._first_steps, step) - 1
        epoch, index = self._epoch(number), step - self._first_steps[number]
        weight = float(epoch.step_weights[index])
        packs = [epoch.packs[pack] for pack in epoch.shares[index, rank].tolist()]
        size = self.micro_batch_size
        return [
            MicroBatch(tuple(packs[start : start + size]), weight)
            for start in range(0, len(packs), size)
        ]

    def _count_another_epoch(self) -> None:
        plan = self._epoch(len(self._first_steps) - 1)
        self._first_steps.append(self._first_steps[-1] + len(plan.step_weights))

    def _plan_epoch(self, epoch: int) -> _EpochPlan:
        rows = self._epoch_rows(epoch)
        lengths = self._lengths[rows]
        plan = pack_documents(
            lengths,
            self._capacity,
            self._seed,
            epoch,
            self._method,
            window=self._window,
            datasets=None if self._datasets is None else self._datasets[rows],
        )
        packs = Packs(rows[plan.documents], plan.starts)
        steps = math.ceil(len(packs) / self.packs_per_step)
        costs = np.zeros(steps * self.packs_per_step)
        squares = (lengths * lengths)[plan.documents]
        costs[: len(packs)] = np.add.reduceat(squares, plan.starts[:-1])
        # Summed in the order of the packs, so that the sum is bit-equal for every world size.
        weights = np.add.reduceat(self._label_weights[packs.documents], packs.starts[:-1])
        step_weights = np.add.reduceat(weights, np.arange(steps) * self.packs_per_step)
        return _EpochPlan(packs, share_out(costs.reshape(steps, -1), self.world_size), step_weights)


def fit_accumulation(most: int, num_packs: int, packs_at_once: int) -> int:
    """Return at most `most` accumulation steps, fewer if an epoch had less than _MIN_STEPS steps.

    `packs_at_once`: packs that all ranks take in one accumulation step.
    """
    return max(1, min(most, num_packs // (_MIN_STEPS * packs_at_once)))


def share_out(costs: npt.NDArray[np.float64], world_size: int) -> Indices:
    """Give each rank the same number of packs of every step, with similar totals of `costs`.

    `costs` [steps, packs a step]. Returns pack indices int64 [steps, ranks, packs of a rank], over
    all steps. Greedy, most expensive first: of the next `world_size` packs of a step, the rank with
    the lowest total in this step gets the most expensive one, so that ranks process similar packs
    at the same time. Differences left in one step are evened out by the following steps.
    """
    steps, size = costs.shape
    order = np.argsort(-costs, axis=1, kind="stable")
    packs = order + np.arange(steps)[:, None] * size
    if world_size == 1:
        return packs[:, None, :]
    rows = np.arange(steps)[:, None]
    shares = np.empty((steps, world_size, size // world_size), dtype=np.int64)
    totals = np.zeros((steps, world_size))
    for place in range(size // world_size):
        group = slice(place * world_size, (place + 1) * world_size)
        least_first = np.argsort(totals, axis=1, kind="stable")
        shares[rows, least_first, place] = packs[:, group]
        totals[rows, least_first] += costs[rows, order[:, group]]
    return shares[rows, _even_out(totals)]


def _even_out(totals: npt.NDArray[np.float64]) -> Indices:
    """Return the share of each step that goes to each rank [steps, ranks].

    The most expensive share goes to the rank with the lowest total so far.
    """
    ranks = range(totals.shape[1])
    most_expensive_first = np.argsort(-totals, axis=1, kind="stable").tolist()
    so_far = [0.0] * len(ranks)
    share_of = np.empty(totals.shape, dtype=np.int64)
    for step, (shares, cost) in enumerate(zip(most_expensive_first, totals.tolist(), strict=True)):
        for rank, share in zip(sorted(ranks, key=so_far.__getitem__), shares, strict=True):
            share_of[step, rank] = share
            so_far[rank] += cost[share]
    return share_of


class StepSampler:
    """Yield one rank's micro-batches from `first_step` on, to which it seeks in O(1)."""

    def __init__(self, plan: StepPlan, rank: int, first_step: int = 0) -> None:
        self._plan, self._rank, self._first_step = plan, rank, first_step

    def __len__(self) -> int:
        return (self._plan.num_steps - self._first_step) * self._plan.accumulation_steps

    def __iter__(self) -> Iterator[MicroBatch]:
        for step in range(self._first_step, self._plan.num_steps):
            yield from self._plan.micro_batches(step, self._rank)


def shard_packs(
    packs: Packs, micro_batch_size: int, world_size: int, rank: int
) -> list[MicroBatch]:
    """Return `rank`'s share of one pass over `packs`, the same number of micro-batches per rank.

    For validation, so the step weight is 1.
    """
    count = math.ceil(len(packs) / (micro_batch_size * world_size))
    starts = [(index * world_size + rank) * micro_batch_size for index in range(count)]
    return [
        MicroBatch(tuple(packs[start + i] for i in range(micro_batch_size)), 1.0)
        for start in starts
    ]


@dataclass(frozen=True, slots=True)
class Packs:
    """Documents in packs: pack i is `documents[starts[i]:starts[i + 1]]`."""

    documents: Indices
    starts: Indices

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, pack: int) -> Indices:
        """Return the documents of a pack; packs beyond the last one are empty."""
        if pack >= len(self):
            return self.documents[:0]
        return self.documents[self.starts[pack] : self.starts[pack + 1]]


def pack_documents(
    lengths: Indices,
    capacity: int,
    seed: int,
    epoch: int,
    method: str,
    *,
    window: int | None = None,
    datasets: Indices | None = None,
) -> Packs:
    """Put each document into one pack of at most `capacity` tokens, in a seeded order.

    `lengths` int64 [documents], none above `capacity`. `multipack` cuts the shuffled documents into
    packs and fills the gaps with the shortest documents, so that packs mix long and short ones and
    each step is a fair sample; `like_length` packs neighbours within windows sorted by length;
    `none` gives each document its own pack. With every method a document is in any step with the
    same probability, so the gradient is unbiased. With `window`, only that many consecutive
    documents of the shuffled order are packed together. With `datasets` [documents], each block of
    about BLOCK_PACKS packs has every data set's share of the tokens. Returns positions in
    `lengths`.
    """
    if not len(lengths):
        return Packs(np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int64))
    if (longest := int(lengths.max())) > capacity:
        raise ValueError(f"a document of {longest} tokens does not fit a pack of {capacity}")
    if lengths.min() < 1:
        raise ValueError(f"document {int(lengths.argmin())} has no tokens; it cannot be packed")
    rng = seeded_generator(seed, "packing", epoch)
    order = rng.permutation(len(lengths))
    pack_of, num_packs = np.empty(len(order), dtype=np.int64), 0
    for start in range(0, len(order), window or len(order)):
        group = slice(start, start + (window or len(order)))
        chosen, count = _choose(lengths[order[group]], capacity, method, rng)
        pack_of[group] = chosen + num_packs
        num_packs += count
    tokens = None
    if datasets is not None:
        columns = int(datasets.max()) + 1
        cells = pack_of * columns + datasets[order]
        tokens = np.bincount(cells, lengths[order], num_packs * columns).reshape(-1, columns)
    pack_of = _pack_order(num_packs, tokens, rng)[pack_of]
    counts = np.bincount(pack_of, minlength=num_packs)
    return Packs(order[sort_order(pack_of)], np.concatenate([[0], np.cumsum(counts)]))


def sort_order(keys: Indices) -> Indices:
    """Return the stable argsort of non-negative `keys`.

    NumPy radix-sorts 16-bit keys, ten times as fast as wider ones.
    """
    if not len(keys) or int(keys.max()) < 1 << 16:
        return np.argsort(keys.astype(np.uint16), kind="stable")
    order = np.argsort((keys & 0xFFFF).astype(np.uint16), kind="stable")
    return order[sort_order(keys[order] >> 16)]


def _pack_order(
    num_packs: int, tokens: npt.NDArray[Any] | None, rng: np.random.Generator
) -> Indices:
    """Return the place of each pack in the epoch, every place equally likely.

    `tokens` [packs, data sets]. The epoch is cut into blocks of about BLOCK_PACKS packs. In each
    round every block gets one of the shuffled packs: for the data set in which the blocks differ
    most, the block with the most tokens of it gets the pack with the fewest. Then the blocks are
    shuffled, and the packs within each.
    """
    num_blocks = num_packs // BLOCK_PACKS
    shuffled = rng.permutation(num_packs)
    if tokens is None or tokens.shape[1] < 2 or num_blocks < 2:
        return shuffled
    held = np.zeros((num_blocks, tokens.shape[1]))
    block_of = np.empty(num_packs, dtype=np.int64)
    for start in range(0, num_packs, num_blocks):
        packs = shuffled[start : start + num_blocks]
        dataset = int(held.var(axis=0).argmax())
        blocks = np.argsort(-held[:, dataset], kind="stable")[: len(packs)]
        packs = packs[np.argsort(tokens[packs, dataset], kind="stable")]
        block_of[packs] = blocks
        held[blocks] += tokens[packs]
    order = rng.permutation(num_packs)
    order = order[sort_order(rng.permutation(num_blocks)[block_of[order]])]
    place = np.empty(num_packs, dtype=np.int64)
    place[order] = np.arange(num_packs)
    return place


def _choose(
    sizes: Indices, capacity: int, method: str, rng: np.random.Generator
) -> tuple[Indices, int]:
    """Return the pack of each document, and the number of packs."""
    if method == "none":
        return np.arange(len(sizes)), len(sizes)
    if method == "multipack":
        return _multipack(sizes, capacity, rng)
    windows = np.arange(len(sizes)) // _LIKE_LENGTH_WINDOW
    order = sort_order(sizes)
    order = order[sort_order(windows[order])]
    starts = next_fit(sizes[order], capacity)
    pack_of = np.empty(len(sizes), dtype=np.int64)
    pack_of[order] = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(sizes)))
    return pack_of, len(starts)


def _multipack(sizes: Indices, capacity: int, rng: np.random.Generator) -> tuple[Indices, int]:
    """Pack the longer documents by next fit, then the shorter ones by best fit.

    If there are too few short documents to fill the packs, best fit decreasing over all documents
    may need fewer packs, at the price of packs of similar lengths; it is used if it saves enough.
    """
    is_short = sizes <= _longest_short(sizes, capacity)
    long = np.flatnonzero(~is_short)
    starts = next_fit(sizes[long], capacity)
    rooms = capacity - np.add.reduceat(sizes[long], starts) if len(long) else long
    pack_of = np.empty(len(sizes), dtype=np.int64)
    pack_of[long] = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(long)))
    short = np.flatnonzero(is_short)
    short = short[sort_order(capacity - sizes[short])]
    pack_of[short], num_packs = best_fit(sizes[short], rooms, capacity, rng)
    if int(sizes.sum()) < _WELL_FILLED * num_packs * capacity:
        order = sort_order(capacity - sizes)
        tight, num_tight = best_fit(sizes[order], rooms[:0], capacity, rng)
        if num_tight <= _WORTH_IT * num_packs:
            pack_of[order] = tight
            num_packs = num_tight
    return pack_of, num_packs


def _longest_short(sizes: Indices, capacity: int) -> int:
    """Return the length up to which documents are reserved to fill the gaps in packs.

    A pack filled by next fit has free room of half the document that did not fit, on average; a
    longer document is more often that one: sum(length^2) / (2 * sum(length)).
    """
    counts = np.bincount(sizes)
    tokens = counts * np.arange(len(counts))
    short = np.cumsum(tokens)
    long = short[-1] - short
    squares = tokens * np.arange(len(counts))
    room = (squares.sum() - np.cumsum(squares)) / np.maximum(2 * long, 1)
    expected = long * room / np.maximum(capacity - room, 1)
    return int(np.argmax(short >= _SHORT_SHARE * expected))


def next_fit(sizes: Indices, capacity: int) -> Indices:
    """Return the first document of each pack; a pack takes documents until one does not fit."""
    ends = np.cumsum(sizes).tolist()
    starts: list[int] = []
    first = 0
    while first < len(ends):
        starts.append(first)
        filled = ends[first - 1] if first else 0
        first = bisect_right(ends, filled + capacity, first)
    return np.array(starts, dtype=np.int64)


def best_fit(
    sizes: Indices, rooms: Indices, capacity: int, rng: np.random.Generator
) -> tuple[Indices, int]:
    """Return the pack of each document, and the number of packs.

    `sizes` decreasing; `rooms` are the free tokens of existing packs. Each document goes into the
    fullest pack that has room, else into a new one. Documents of the same length are placed at
    once, into all packs with the same room. Bit r of `open_rooms` is set if `packs[r]` is not
    empty, so the tightest fit is the lowest set bit from the document's length up.
    """
    packs: dict[int, list[int]] = {}
    open_rooms = 0
    shuffled = rng.permutation(len(rooms))
    for pack, room in zip(shuffled.tolist(), rooms[shuffled].tolist(), strict=True):
        packs.setdefault(room, []).append(pack)
    for room in packs:
        open_rooms |= 1 << room
    num_packs = len(rooms)
    chosen: list[int] = []
    counts = np.bincount(sizes)
    present = np.flatnonzero(counts)[::-1]
    for size, count in zip(present.tolist(), counts[present].tolist(), strict=True):
        while count:
            fitting = open_rooms >> size
            if fitting:
                room = size + (fitting & -fitting).bit_length() - 1
                each, into = _shares(count, room // size, len(packs[room]))
                same = packs[room]
                taken = same[len(same) - into :]
                del same[len(same) - into :]
                if not same:
                    open_rooms ^= 1 << room
            else:
                room = capacity
                each, into = _shares(count, room // size, count)
                taken = list(range(num_packs, num_packs + into))
                num_packs += into
            chosen += taken if each == 1 else [pack for pack in taken for _ in range(each)]
            count -= each * into
            left = room - each * size
            if left:
                packs.setdefault(left, []).extend(taken)
                open_rooms |= 1 << left
    return np.array(chosen, dtype=np.int64), num_packs


def _shares(count: int, most: int, num_packs: int) -> tuple[int, int]:
    """Return documents per pack and number of packs, for `count` documents and `most` per pack."""
    num_filled = min(count // most, num_packs)
    return (most, num_filled) if num_filled else (count, 1)
