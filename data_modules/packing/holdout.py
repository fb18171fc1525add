"""Decide which rows are for validation, and which are left out of the training because of that.

Rows with the same tokens are on one side, in all data sets together. Never looks at text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from data_modules.types import DataError, seeded_generator

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from data_modules.tokens.store import TokenStore

    Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Sides:
    """Say of a data set's documents which are learned and which are for validation.

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
) -> list[Sides]:
    """Return the sides of each data set.

    `val_set_size` is a share of the rows below 1, else a number of rows; a data set of one row
    holds none out. Rows alike are held out together or not at all, so there may be fewer than asked
    for. `max_rows` caps the rows that are learned. Raises DataError when a number of rows leaves
    none to learn.
    """
    import numpy as np

    validation = []
    for store, name, path in zip(stores, names, paths, strict=True):
        rows = _Rows(store)
        if val_set_size >= max(2, len(rows)):
            raise DataError(
                f"{path}: data.val_set_size={val_set_size:g} leaves none of its {len(rows):,} rows "
                "to learn; give fewer, or a share below 1"
            )
        validation.append(rows.choose(val_set_size, seed, name))
    held_out = [store.digests[mask] for store, mask in zip(stores, validation, strict=True)]
    digests = np.unique(np.concatenate([np.zeros(0, np.uint64), *held_out]))
    return [
        _sides(store, mask, digests, cap, seed, name)
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


def _sides(
    store: TokenStore,
    validation: Mask,
    held_out: npt.NDArray[np.uint64],
    cap: int | None,
    seed: int,
    name: str,
) -> Sides:
    import numpy as np

    repeated = np.unique(store.rows[np.isin(store.digests, held_out) & ~validation])
    training = ~validation & ~np.isin(store.rows, repeated)
    rows = np.unique(store.rows[training])
    if cap is not None and cap < len(rows):
        kept = seeded_generator(seed, "cap", name).permutation(rows)[:cap]
        training &= np.isin(store.rows, kept)
    return Sides(training, validation, len(repeated))
