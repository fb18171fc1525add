"""Decide which rows of several data sets an epoch holds.

A data set's weight is how often each of its rows is seen in an epoch. Never orders the rows of a
step: packing does that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from data_modules.types import seeded_generator


class Mixture:
    """Choose the rows of each epoch: 1.0 = each row once, 0.5 = a seeded half, 2.0 = each twice.

    With a fraction, epoch after epoch goes on where the one before ended in one fixed seeded order
    of the rows, so that all rows are seen equally often in the long run.
    """

    def __init__(
        self, groups: Sequence[npt.NDArray[np.int64]], weights: Sequence[float], seed: int
    ) -> None:
        self._parts = [
            (seeded_generator(seed, "mixture", index).permutation(group), weight)
            for index, (group, weight) in enumerate(zip(groups, weights, strict=True))
        ]

    def epoch(self, number: int) -> npt.NDArray[np.int64]:
        """Return the example indices of epoch `number` (from 0), int64 [rows seen]."""
        chosen = []
        for order, weight in self._parts:
            count = max(1, round(weight * len(order)))
            start = number * count
            chosen.append(order[np.arange(start, start + count) % len(order)])
        return np.concatenate(chosen)


def split_rows(num_rows: int, val_set_size: float, seed: int, name: str) -> npt.NDArray[np.bool_]:
    """Return which rows of data set `name` are for validation, bool [num_rows].

    `val_set_size` is a share below 1, else a number of rows; at least one row goes to each side
    when there are two.
    """
    chosen = np.zeros(num_rows, dtype=np.bool_)
    if val_set_size > 0 and num_rows > 1:
        wanted = val_set_size if val_set_size >= 1 else round(val_set_size * num_rows)
        count = min(max(1, int(wanted)), num_rows - 1)
        chosen[seeded_generator(seed, "split", name).permutation(num_rows)[:count]] = True
    return chosen
