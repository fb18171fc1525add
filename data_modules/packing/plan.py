"""Plan which documents are trained on in which step and by which rank.

A step's documents are a pure function of (lengths, capacity, seed, epoch), the same for every
number of ranks. Which documents share a pack, bins.py decides. Never reads a token.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from data_modules.facts import setting
from data_modules.packing.bins import Packs as Packs
from data_modules.packing.bins import pack_documents as pack_documents

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Indices = npt.NDArray[np.int64]


@dataclass(kw_only=True, slots=True)
class PackingConfig:
    """Choose how documents share a row."""

    method: str = setting("multipack", choices=("multipack", "like_length", "none"))
    """multipack: documents fill packs of `data.sequence_len` tokens and cannot see each other
    (fastest); like_length: the same with documents of like length in a pack (cheaper attention,
    packs less alike); none: one document a row, right-padded (the plain way, slower), which a run
    takes by itself, and says so, for models whose documents cannot be kept apart in a pack"""
    window: int | None = setting(None, ge=1)
    """documents that are packed among themselves; null = all of an epoch (fuller packs)"""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Hold the documents of one rank's micro-batch, one array of example indices a pack."""

    packs: tuple[Indices, ...]
    step_weight: float


@dataclass(frozen=True, slots=True)
class _EpochPlan:
    """Hold the packs of an epoch and who does them: `shares` int64 [steps, ranks, packs]."""

    packs: Packs
    shares: Indices
    step_weights: npt.NDArray[np.float64]


class StepPlan:
    """Plan all global steps of a run, through all its epochs.

    A global step is `micro_batch_size * accumulation_steps * world_size` packs; which documents it
    holds depends on that product only. The last step of an epoch is filled up with empty packs,
    so every rank has the same number of micro-batches and every accumulation window is full.
    Ranks get like shares of sum(length^2), the cost of attention: packs that are done side by side
    are as alike as the step's packs allow, and so are the ranks' totals, in a step and, closer
    still, over the epoch.
    `epoch_rows(epoch)` gives the example indices of an epoch. With `max_steps`, epochs repeat
    until there are that many steps; else there are `num_epochs`. `window` and `datasets` (the data
    set of each example) are those of `pack_documents`.
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
        window: int | None = None,
        datasets: Indices | None = None,
    ) -> None:
        if not len(lengths):
            raise ValueError("no documents to plan steps for")
        self._lengths, self._label_weights = lengths, label_weights
        self._epoch_rows, self._datasets = epoch_rows, datasets
        self._capacity, self._method, self._seed = capacity, method, seed
        self._window = window
        self.micro_batch_size = micro_batch_size
        self.accumulation_steps = accumulation_steps
        self.world_size = world_size
        self.packs_per_step = micro_batch_size * accumulation_steps * world_size
        self._epoch = lru_cache(maxsize=2)(self._plan_epoch)
        self._first_steps = [0]
        if max_steps is None:
            while len(self._first_steps) <= num_epochs:
                self._count_another_epoch()
        self.num_steps = self._first_steps[-1] if max_steps is None else max_steps

    def line(self) -> str:
        """Say how the first epoch's rows become packs and steps, and how many steps there are."""
        packs, steps = self._epoch(0).packs, len(self._epoch(0).step_weights)
        tokens = int(self._lengths[packs.documents].sum())
        line = (
            f"{len(packs.documents):,} documents in {_count(len(packs), 'pack')}, "
            f"{tokens / (len(packs) * self._capacity):.1%} of {self._capacity:,} tokens full; "
            f"{_count(steps, 'step')} of {_count(self.packs_per_step, 'pack')} an epoch"
        )
        if self.num_steps != steps:
            line += f"; {_count(self.num_steps, 'step')} = {self.num_steps / steps:.2f} epochs"
        if len(packs) < self.packs_per_step:
            line += (
                f"; {_count(len(packs), 'pack')} for a global batch of {self.packs_per_step:,}: "
                "lower trainer.global_batch_size"
            )
        if (idle := self.world_size - len(packs)) > 0:
            line += f"; {_count(idle, 'rank')} of {self.world_size} will have nothing to do"
        return line

    def ends_epoch(self, step: int) -> bool:
        """Tell whether an epoch is through when `step` steps are done."""
        while self._first_steps[-1] < step:
            self._count_another_epoch()
        return step in self._first_steps[1:]

    def step_weight(self, step: int) -> float:
        """Return the sum of the loss weights of all labels of a global step."""
        epoch, index = self._locate(step)
        return float(epoch.step_weights[index])

    def micro_batches(self, step: int, rank: int) -> list[MicroBatch]:
        """Return what `rank` does in a global step, `accumulation_steps` micro-batches."""
        epoch, index = self._locate(step)
        weight = float(epoch.step_weights[index])
        packs = [epoch.packs[pack] for pack in epoch.shares[index, rank].tolist()]
        size = self.micro_batch_size
        return [
            MicroBatch(tuple(packs[start : start + size]), weight)
            for start in range(0, len(packs), size)
        ]

    def _locate(self, step: int) -> tuple[_EpochPlan, int]:
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step {step} of {self.num_steps}")
        while self._first_steps[-1] <= step:
            self._count_another_epoch()
        epoch = bisect_right(self._first_steps, step) - 1
        return self._epoch(epoch), step - self._first_steps[epoch]

    def _count_another_epoch(self) -> None:
        plan = self._epoch(len(self._first_steps) - 1)
        self._first_steps.append(self._first_steps[-1] + len(plan.step_weights))

    def _plan_epoch(self, epoch: int) -> _EpochPlan:
        import numpy as np

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
        # Summed in the order of the packs, so that it is the same number for every world size.
        weights = np.add.reduceat(self._label_weights[packs.documents], packs.starts[:-1])
        step_weights = np.add.reduceat(weights, np.arange(steps) * self.packs_per_step)
        return _EpochPlan(packs, share_out(costs.reshape(steps, -1), self.world_size), step_weights)


def share_out(costs: npt.NDArray[np.float64], world_size: int) -> Indices:
    """Give each rank equally many packs of every step, with totals of `costs` that are alike.

    `costs` [steps, packs a step]. Returns packs int64 [steps, ranks, packs of a rank], counted
    through all steps. Dearest first: of the next `world_size` packs of a step, the rank that has
    least in this step gets the dearest; packs at the same place of different ranks are so alike.
    What is left unequal in a step is evened out by the steps after it.
    """
    import numpy as np

    steps, size = costs.shape
    order = np.argsort(-costs, axis=1, kind="stable")
    packs = order + np.arange(steps)[:, None] * size
    if world_size == 1:
        return packs[:, None, :]
    rows = np.arange(steps)[:, None]
    shares = np.empty((steps, world_size, size // world_size), dtype=np.int64)
    totals = np.zeros((steps, world_size))
    for place in range(size // world_size):
        here = slice(place * world_size, (place + 1) * world_size)
        least_first = np.argsort(totals, axis=1, kind="stable")
        shares[rows, least_first, place] = packs[:, here]
        totals[rows, least_first] += costs[rows, order[:, here]]
    return shares[rows, _even_out(totals)]


def _even_out(totals: npt.NDArray[np.float64]) -> Indices:
    """Return which share of each step goes to each rank [steps, ranks].

    The dearest share goes to the rank that has least so far.
    """
    import numpy as np

    ranks = range(totals.shape[1])
    dearest_first = np.argsort(-totals, axis=1, kind="stable").tolist()
    so_far = [0.0] * len(ranks)
    taken = np.empty(totals.shape, dtype=np.int64)
    for step, (shares, cost) in enumerate(zip(dearest_first, totals.tolist(), strict=True)):
        for rank, share in zip(sorted(ranks, key=so_far.__getitem__), shares, strict=True):
            taken[step, rank] = share
            so_far[rank] += cost[share]
    return taken


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


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
