"""Decide which rows of several data sets an epoch holds, and how often.

Never orders the rows of an epoch: packing does that.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from data_modules.facts import setting
from data_modules.messages import DataError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Indices = npt.NDArray[np.int64]
    from data_modules.tokens.store import TokenStore

    Mask = npt.NDArray[np.bool_]

MANY_EPOCHS = 4
"""times that a row may be seen in an epoch by the choice of others' sizes"""


@dataclass(kw_only=True, slots=True)
class MixtureConfig:
    """Choose what the weights of the data sets mean."""

    weights: str = setting("epochs", choices=("epochs", "rows", "tokens"))
    """epochs: how often each row is seen in an epoch; rows: a data set's share of an epoch's rows;
    tokens: its share of an epoch's tokens. Shares need not sum to 1: 7 and 3 are 70 % and 30 %"""
    temperature: float | None = setting(None, gt=0)
    """null: the weights are the shares, whatever the data sets' sizes; T: shares go with
    weight * size^(1/T), size in rows or tokens: 1 = as large as they are, more = more equal"""
    stop: str = setting("all", choices=("all", "first"))
    """with shares, an epoch ends when all data sets were seen once (all: the others repeat), or
    when the first one is used up (first: of the others a part is seen, a new one in each epoch)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureRow:
    """Say what one data set gives to an epoch.

    `rows` and `tokens` are those of the data set, `rows_seen` and `tokens_seen` those of the epoch;
    `epochs` is how often a row is seen on average. Shares are those of the whole epoch; `requested`
    is None with weights in epochs. Tokens are 0 without lengths.
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
        "data set",
        "rows",
        "tokens",
        "epochs",
        "rows seen",
        "of rows",
        "of tokens",
        "requested",
    )

    def cells(self) -> tuple[str, ...]:
        """Return it as text, a cell a heading."""
        return (
            self.name,
            f"{self.rows:,}",
            f"{self.tokens:,}",
            f"{self.epochs:.3g}",
            f"{self.rows_seen:,}",
            f"{self.share_of_rows:.2%}",
            f"{self.share_of_tokens:.2%}",
            "" if self.requested is None else f"{self.requested:.2%}",
        )


def seeded_generator(seed: int, *keys: object) -> np.random.Generator:
    """Return a generator that depends on `seed` and `keys` only, on every machine."""
    import numpy as np

    digest = hashlib.sha256(repr((seed, *keys)).encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))


class Mixture:
    """Choose the rows of each epoch.

    `groups` are the example indices of each data set, `weights` one number each, `lengths` the
    tokens of each example (for weights in tokens, and for the report).

    Every data set goes round and round in one fixed seeded order of its rows. An epoch goes on
    where the one before ended, so that all rows are seen equally often (give or take one) and a
    share that was rounded in one epoch is made good in the next. A data set without rows, or of
    weight 0, gives nothing and has no share.
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
        import numpy as np

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
        import numpy as np

        return np.concatenate([self._seen(index, number) for index in range(len(self._orders))])

    def report(self, names: Sequence[str], number: int = 0) -> list[MixtureRow]:
        """Return what each data set gives to epoch `number`."""
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
        """Return the requested shares, and how often each row is seen in an epoch."""
        kind, temperature, stop = (
            self._config.weights,
            self._config.temperature,
            self._config.stop,
        )
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
        total = max(whole) if stop == "all" else min(whole)
        return shares, [
            share * total / size if size else 0.0 for share, size in zip(shares, sizes, strict=True)
        ]

    def _seen(self, index: int, number: int) -> Indices:
        import numpy as np

        order = self._orders[index]
        if not len(order):
            return order
        first, last = self._position(index, number), self._position(index, number + 1)
        rounds = [order] * (last // len(order) - first // len(order) + 1)
        start = first % len(order)
        return np.concatenate(rounds)[start : start + last - first]

    def _position(self, index: int, number: int) -> int:
        """Return how many rows of a data set are seen before epoch `number`."""
        import numpy as np

        size = len(self._orders[index])
        if not number or not self._passes[index]:
            return 0
        # Rounded where 3 * 0.1 would be a little more than 0.3; then up, to one row at least, so
        # that the first epoch has a row of every data set.
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
    """Return the report as a table, one line a data set under a line of headings.

    A last line warns of data sets that shares make an epoch repeat more than four times.
    """
    cells = [MixtureRow.HEADINGS, *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]
    repeated = [row for row in rows if row.requested is not None and row.epochs > MANY_EPOCHS]
    if repeated:
        named = ", ".join(f"{row.name} {row.epochs:.3g} times" for row in repeated)
        lines.append(
            f"warning: for their shares rows are seen in one epoch again and again: {named}; "
            "data.mixture.stop=first ends an epoch before a data set repeats"
        )
    return lines


@dataclass(frozen=True, slots=True)
class Split:
    """Say of a data set's documents which are trained on and which are for validation.

    Both are bool [documents]; a document may be neither. `repeated_rows` stand in validation of
    some data set, word for word, and are left out of the training.
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
    """Return the sides of each data set.

    `val_set_size` is a share of the rows below 1, else a number of rows; a data set of one row
    holds none out. Rows alike are held out together or not at all, so there may be fewer.
    `max_rows` caps the training rows. Raises DataError when a number of rows leaves
    none to train on.
    """
    import numpy as np

    validation = []
    for store, name, path in zip(stores, names, paths, strict=True):
        rows = _Rows(store)
        if val_set_size >= max(2, len(rows)):
            raise DataError(
                f"{path}: data.val_set_size={val_set_size:g} leaves none of its {len(rows):,} rows "
                "to train on; give fewer, or a share below 1"
            )
        validation.append(rows.choose(val_set_size, seed, name))
    held_out = [store.digests[mask] for store, mask in zip(stores, validation, strict=True)]
    digests = np.unique(np.concatenate([np.zeros(0, np.uint64), *held_out]))
    return [
        _split_rows(store, mask, digests, cap, seed, name)
        for store, mask, cap, name in zip(stores, validation, max_rows, names, strict=True)
    ]


class _Rows:
    """Number the rows of a data set that have documents, and tell which are alike."""

    def __init__(self, store: TokenStore) -> None:
        import numpy as np

        _, self._firsts, self._of_document = np.unique(
            store.rows, return_index=True, return_inverse=True
        )
        self._content = np.add.reduceat(store.digests, self._firsts)

    def __len__(self) -> int:
        return len(self._firsts)

    def choose(self, val_set_size: float, seed: int, name: str) -> Mask:
        """Return a seeded choice of rows, all those alike or none, as bool [documents]."""
        import numpy as np

        chosen = np.zeros(len(self), dtype=np.bool_)
        if val_set_size > 0 and len(self) > 1:
            wanted = val_set_size if val_set_size >= 1 else round(val_set_size * len(self))
            count = min(max(1, int(wanted)), len(self) - 1)
            _, first_rows, kinds, sizes = np.unique(
                self._content, return_index=True, return_inverse=True, return_counts=True
            )
            # Numbered as they come, so that without doubles the choice is one among the rows.
            in_order = np.argsort(first_rows)
            order = in_order[seeded_generator(seed, "split", name).permutation(len(sizes))]
            taken = np.zeros(len(sizes), dtype=np.bool_)
            taken[_fill(order, sizes, count)] = True
            chosen = taken[kinds]
        return chosen[self._of_document]


def _fill(
    order: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], count: int
) -> npt.NDArray[np.int64]:
    """Return the kinds that together have `count` rows, in their order; what is too large waits."""
    import numpy as np

    chosen: list[npt.NDArray[np.int64]] = []
    while count and len(order):
        ends = np.cumsum(sizes[order])
        fitting = int(ends.searchsorted(count, side="right"))
        chosen.append(order[:fitting])
        count -= int(ends[fitting - 1]) if fitting else 0
        order = order[fitting:]
        order = order[sizes[order] <= count]
    return np.concatenate([order[:0], *chosen])


def _split_rows(
    store: TokenStore,
    validation: Mask,
    held_out: npt.NDArray[np.uint64],
    cap: int | None,
    seed: int,
    name: str,
) -> Split:
    import numpy as np

    repeated = np.unique(store.rows[np.isin(store.digests, held_out) & ~validation])
    training = ~validation & ~np.isin(store.rows, repeated)
    rows = np.unique(store.rows[training])
    if cap is not None and cap < len(rows):
        kept = seeded_generator(seed, "cap", name).permutation(rows)[:cap]
        training &= np.isin(store.rows, kept)
    return Split(training, validation, len(repeated))
