"""Plan which documents are learned in which step; the same for every number of ranks.

A plan is a pure function of (lengths, capacity, seed, epoch). Never reads a token.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from data_modules.types import seeded_generator

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Indices = npt.NDArray[np.int64]

PACKING_METHODS = ("multipack", "like_length", "none")
LIKE_LENGTH_WINDOW = 2000
"""documents of the shuffled order among which like lengths are brought together"""


@dataclass(kw_only=True, slots=True)
class PackingConfig:
    """Choose how documents share a row."""

    method: str = "multipack"
    """multipack: documents fill packs of `data.sequence_len` tokens and cannot see each other
    (fastest); like_length: the same with documents of like length in a pack (cheaper attention,
    packs less alike); none: one document a row, right-padded (the plain way, slower)"""


def check_packing(config: PackingConfig) -> None:
    """Raise ValueError when `config` names no method."""
    if config.method not in PACKING_METHODS:
        known = " or ".join(PACKING_METHODS)
        raise ValueError(f"packing.method is '{config.method}'; use {known}")


@dataclass(frozen=True, slots=True)
class Packs:
    """Hold documents in packs: pack i is `documents[starts[i]:starts[i + 1]]`."""

    documents: Indices
    starts: Indices

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, pack: int) -> Indices:
        """Return the documents of a pack; packs beyond the last one are empty."""
        if pack >= len(self):
            return self.documents[:0]
        return self.documents[self.starts[pack] : self.starts[pack + 1]]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Hold the documents of one rank's micro-batch, one array of example indices a pack."""

    packs: tuple[Indices, ...]
    step_weight: float


def pack_documents(lengths: Indices, capacity: int, seed: int, epoch: int, method: str) -> Packs:
    """Put each document into one pack of at most `capacity` tokens, in a seeded order.

    `lengths` int64 [documents], none above `capacity`. Best fit in shuffled order, not in
    decreasing order: packs then hold long and short documents alike, and each step is a fair
    sample of the data. `like_length` packs the neighbours of windows sorted by length instead; the
    order of the packs is shuffled all the same, so the gradient stays unbiased. Returns positions
    in `lengths`.
    """
    import numpy as np

    if len(lengths) and int(lengths.max()) > capacity:
        longest = int(lengths.max())
        raise ValueError(f"a document of {longest} tokens does not fit a pack of {capacity}")
    rng = seeded_generator(seed, "packing", epoch)
    order = rng.permutation(len(lengths))
    if method == "none":
        return Packs(order, np.arange(len(order) + 1))
    if method == "like_length":
        bounds = range(LIKE_LENGTH_WINDOW, len(order), LIKE_LENGTH_WINDOW)
        windows = np.split(order, bounds)
        order = np.concatenate([w[np.argsort(lengths[w], kind="stable")] for w in windows])
    choose = _next_fit if method == "like_length" else _best_fit
    pack_of = np.array(choose(lengths[order].tolist(), capacity), dtype=np.int64)
    num_packs = int(pack_of.max()) + 1 if len(pack_of) else 0
    place = rng.permutation(num_packs)
    pack_of = place[pack_of] if num_packs else pack_of
    by_pack = np.argsort(pack_of, kind="stable")
    counts = np.bincount(pack_of, minlength=num_packs)
    return Packs(order[by_pack], np.concatenate([[0], np.cumsum(counts)]))


def _next_fit(lengths: list[int], capacity: int) -> list[int]:
    """Return the pack of each document: the last one while it has room, else a new one."""
    chosen: list[int] = []
    pack, room = -1, 0
    for length in lengths:
        if length > room:
            pack, room = pack + 1, capacity
        room -= length
        chosen.append(pack)
    return chosen


def _best_fit(lengths: list[int], capacity: int) -> list[int]:
    """Return the pack of each document: the fullest one that has room, else a new one.

    Packs are found by the room that they have left: `rooms` has bit r set when a pack with room r
    is open, so the tightest fit is the lowest bit from the document's length up.
    """
    open_packs: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0
    num_packs = 0
    chosen: list[int] = []
    for length in lengths:
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            same_room = open_packs[room]
            pack = same_room.pop()
            if not same_room:
                rooms ^= 1 << room
        else:
            room, pack = capacity, num_packs
            num_packs += 1
        left = room - length
        if left:
            if not open_packs[left]:
                rooms |= 1 << left
            open_packs[left].append(pack)
        chosen.append(pack)
    return chosen


class StepPlan:
    """Plan all global steps of a run, through all its epochs.

    A global step is `micro_batch_size * accumulation_steps * world_size` packs; which documents it
    holds depends on that product only. The last step of an epoch is filled up with empty packs,
    so every rank has the same number of micro-batches and every accumulation window is full.
    `epoch_rows(epoch)` gives the example indices of an epoch. With `max_steps`, epochs repeat
    until there are that many steps; else there are `num_epochs`.
    """

    def __init__(
        self,
        lengths: Indices,
        label_weights: npt.NDArray[np.float64],
        epoch_rows: Callable[[int], Indices],
        *,
        capacity: int,
        method: str,
        seed: int,
        micro_batch_size: int,
        accumulation_steps: int,
        world_size: int,
        num_epochs: int = 1,
        max_steps: int | None = None,
    ) -> None:
        if not len(lengths):
            raise ValueError("no documents to plan steps for")
        self._lengths, self._label_weights = lengths, label_weights
        self._epoch_rows = epoch_rows
        self._capacity, self._method, self._seed = capacity, method, seed
        self.micro_batch_size = micro_batch_size
        self.accumulation_steps = accumulation_steps
        self.world_size = world_size
        self.packs_per_step = micro_batch_size * accumulation_steps * world_size
        self._epoch = lru_cache(maxsize=2)(self._plan_epoch)
        self._first_steps = [0]
        while not self._is_complete(num_epochs, max_steps):
            packs, _ = self._epoch(len(self._first_steps) - 1)
            steps = math.ceil(len(packs) / self.packs_per_step)
            self._first_steps.append(self._first_steps[-1] + steps)
        self.num_steps = self._first_steps[-1] if max_steps is None else max_steps

    def _is_complete(self, num_epochs: int, max_steps: int | None) -> bool:
        if max_steps is not None:
            return self._first_steps[-1] >= max_steps
        return len(self._first_steps) > num_epochs

    def line(self) -> str:
        """Say how the first epoch's rows become packs and steps, and how many steps there are."""
        packs, _ = self._epoch(0)
        tokens = int(self._lengths[packs.documents].sum())
        steps = self._first_steps[1]
        return (
            f"{len(packs.documents):,} documents in {len(packs):,} packs, "
            f"{tokens / (len(packs) * self._capacity):.1%} of {self._capacity:,} tokens full; "
            f"{steps:,} steps of {self.packs_per_step:,} packs an epoch; "
            f"{self.num_steps:,} steps = {self.num_steps / steps:.2f} epochs"
        )

    def step_weight(self, step: int) -> float:
        """Return the sum of the loss weights of all labels of a global step."""
        epoch, first = self._locate(step)
        _, pack_weights = self._epoch(epoch)
        return float(pack_weights[first : first + self.packs_per_step].sum())

    def micro_batches(self, step: int, rank: int) -> list[MicroBatch]:
        """Return what `rank` does in a global step, `accumulation_steps` micro-batches."""
        epoch, first = self._locate(step)
        packs, _ = self._epoch(epoch)
        weight = self.step_weight(step)
        batches = []
        for window in range(self.accumulation_steps):
            start = first + (window * self.world_size + rank) * self.micro_batch_size
            chosen = tuple(packs[start + index] for index in range(self.micro_batch_size))
            batches.append(MicroBatch(chosen, weight))
        return batches

    def _locate(self, step: int) -> tuple[int, int]:
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step {step} of {self.num_steps}")
        epoch = bisect_right(self._first_steps, step) - 1
        return epoch, (step - self._first_steps[epoch]) * self.packs_per_step

    def _plan_epoch(self, epoch: int) -> tuple[Packs, npt.NDArray[np.float64]]:
        import numpy as np

        rows = self._epoch_rows(epoch)
        plan = pack_documents(self._lengths[rows], self._capacity, self._seed, epoch, self._method)
        packs = Packs(rows[plan.documents], plan.starts)
        return packs, np.add.reduceat(self._label_weights[packs.documents], packs.starts[:-1])


class StepSampler:
    """Yield one rank's micro-batches from `first_step` on; starting late costs nothing."""

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
    """Return `rank`'s share of one pass over `packs`: equally many micro-batches on each rank.

    For validation, where there is no step: the step weight is 1.
    """
    count = math.ceil(len(packs) / (micro_batch_size * world_size))
    starts = [(index * world_size + rank) * micro_batch_size for index in range(count)]
    return [
        MicroBatch(tuple(packs[start + i] for i in range(micro_batch_size)), 1.0)
        for start in starts
    ]
