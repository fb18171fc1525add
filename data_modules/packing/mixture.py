"""The mixture: which rows of several data sets are in an epoch, and how often; and the holdout.

Never orders the rows of an epoch: packing does that.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from common.errors import DataError
from common.text import aligned, percent
from data_modules.packing import MixtureConfig

if TYPE_CHECKING:
    from data_modules.tokens.store import TokenStore

Indices = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_MANY_EPOCHS = 4
"""repetitions of a row in an epoch above which a mixture by shares warns"""


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureRow:
    """One data set's contribution to an epoch.

    `rows` and `tokens` are those of the data set, `rows_seen` and `tokens_seen` those of the epoch;
    `epochs` is how often a row is seen on average. Shares are of the whole epoch; `requested` is
    None with weights in epochs. Tokens are 0 without lengths.
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
        """Return a text cell for each heading."""
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
    tokens of each example (for weights in tokens, and for the report).

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
        config: MixtureConfig | None = None,
        *,
        lengths: Indices | None = None,
    ) -> None:
        self._config = config or MixtureConfig()
        if self._config.weights == "tokens" and lengths is None:
            raise ValueError("weights in tokens need the lengths of the examples")
        self._orders = [
            seeded_generator(seed, "mixture", index).permutation(group)
            for index, group in enumerate(groups)
        ]
        self._lengths = lengths
        self._ends = None
        if self._config.weights == "tokens" and lengths is not None:
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
        return 0 if self._lengths is None else int(self._lengths[rows].sum())


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
class Split:
    """The training and the validation documents of a data set, as masks, bool [documents].

    A document may be in neither. `repeated_rows` counts the rows that are left out of training
    because validation has an identical one.
    """

    training: Mask
    validation: Mask
    repeated_rows: int = 0


def hold_out(
    stores: Sequence[TokenStore],
    names: Sequence[str],
    paths: Sequence[str],
    max_rows: Sequence[int | None],
    val_set_size: float,
    seed: int,
) -> list[Split]:
    """Split each data set into training and validation.

    `val_set_size` is a share of the rows if below 1, else a number of rows; a data set of one row
    has no validation rows. Identical rows stay on the same side, so there may be fewer validation
    rows than requested. `max_rows` limits the training rows. Raises DataError if no row is left to
    train on.
    """
    validation = [
        _choose_rows(store, val_set_size, path, seed, name)
        for store, name, path in zip(stores, names, paths, strict=True)
    ]
    held_out = [store.digests[mask] for store, mask in zip(stores, validation, strict=True)]
    digests = np.unique(np.concatenate([np.zeros(0, np.uint64), *held_out]))
    splits = []
    for store, mask, cap, name in zip(stores, validation, max_rows, names, strict=True):
        repeated = np.unique(store.rows[np.isin(store.digests, digests) & ~mask])
        training = ~mask & ~np.isin(store.rows, repeated)
        splits.append(Split(_capped(store, training, cap, seed, name), mask, len(repeated)))
    return splits


def only_validation(store: TokenStore, cap: int | None, seed: int, name: str) -> Split:
    """Return a data set's split if all of it, or a seeded choice of `cap` rows, is validation."""
    mask = np.ones(len(store), dtype=np.bool_)
    return Split(~mask, _capped(store, mask, cap, seed, name))


def _choose_rows(store: TokenStore, size: float, path: str, seed: int, name: str) -> Mask:
    """Return a seeded choice of rows, with all identical rows or none, as bool [documents]."""
    _, firsts, of_document = np.unique(store.rows, return_index=True, return_inverse=True)
    num_rows = len(firsts)
    if size >= max(2, num_rows):
        raise DataError(
            f"{path}: data.val_set_size={size:g} leaves none of its {num_rows:,} rows to train on; "
            "set fewer, or a share below 1"
        )
    chosen = np.zeros(num_rows, dtype=np.bool_)
    if size > 0 and num_rows > 1:
        wanted = size if size >= 1 else round(size * num_rows)
        count = min(max(1, int(wanted)), num_rows - 1)
        content = np.add.reduceat(store.digests, firsts)
        _, first_rows, kinds, sizes = np.unique(
            content, return_index=True, return_inverse=True, return_counts=True
        )
        # In order of first occurrence, so that without duplicates rows themselves are chosen.
        in_order = np.argsort(first_rows)
        order = in_order[seeded_generator(seed, "split", name).permutation(len(sizes))]
        taken = np.zeros(len(sizes), dtype=np.bool_)
        taken[_fill(order, sizes, count)] = True
        chosen = taken[kinds]
    return chosen[of_document]


def _fill(
    order: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], count: int
) -> npt.NDArray[np.int64]:
    """Return the kinds that together have `count` rows, in their order; what is too large waits."""
    chosen: list[npt.NDArray[np.int64]] = []
    while count and len(order):
        ends = np.cumsum(sizes[order])
        fitting = int(ends.searchsorted(count, side="right"))
        chosen.append(order[:fitting])
        count -= int(ends[fitting - 1]) if fitting else 0
        order = order[fitting:]
        order = order[sizes[order] <= count]
    return np.concatenate([order[:0], *chosen])


def _capped(store: TokenStore, mask: Mask, cap: int | None, seed: int, name: str) -> Mask:
    """Return a mask with at most `cap` of its rows, a seeded choice."""
    rows = np.unique(store.rows[mask])
    if cap is None or cap >= len(rows):
        return mask
    return mask & np.isin(store.rows, seeded_generator(seed, "cap", name).permutation(rows)[:cap])
