"""Log-probabilities of a base for the pairs of the data sets, in the cache beside their tokens.

Decides where they are and of which pairs they are. Never computes them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from common.redaction import redact
from data_modules.tokens.cache import Key, is_whole, open_or_make

if TYPE_CHECKING:
    from data_modules.tokens.datasets import ReadyDataset

REFERENCE_FILE = "reference.npy"
Values = npt.NDArray[np.float64]


class ReferenceStore:
    """The log-probabilities of each data set's pairs, float64 [documents, 2].

    `identity`: everything besides the tokens that determines them. NaN for rows beyond `max_rows`,
    which no run with these settings reads.
    """

    def __init__(self, root: Path, datasets: Sequence[ReadyDataset], identity: str) -> None:
        self._root, self._datasets = root, datasets
        self.places = [_places(ready) for ready in datasets]
        """documents of each data set, int64 [pairs]"""
        self._keys = [
            _key(ready, places, identity)
            for ready, places in zip(datasets, self.places, strict=True)
        ]

    def read(self) -> list[Values] | None:
        """Return the values of each data set; None unless all are stored."""
        folders = [self._root / key.name for key in self._keys]
        if not all(map(is_whole, folders)):
            return None
        return [np.load(folder / REFERENCE_FILE, allow_pickle=False) for folder in folders]

    def write(self, values: Values) -> list[Values]:
        """Store the values of all `places` [pairs, 2]; return those of each data set.

        Raises DataError if the cache cannot be written.
        """
        borders = np.cumsum([len(places) for places in self.places])[:-1]
        found = []
        for ready, key, places, own in zip(
            self._datasets, self._keys, self.places, np.split(values, borders), strict=True
        ):
            whole = np.full((len(ready.data.store), 2), np.nan)
            whole[places] = own

            def make(folder: Path, whole: Values = whole) -> None:
                np.save(folder / REFERENCE_FILE, whole)

            open_or_make(self._root, key, make)
            found.append(whole)
        return found


def _places(ready: ReadyDataset) -> npt.NDArray[np.int64]:
    """Return the documents whose values are stored: all, whatever a seed holds out of them."""
    if ready.config.max_rows is None:
        return np.arange(len(ready.data.store))
    return np.flatnonzero(ready.split.training | ready.split.validation)


def _key(ready: ReadyDataset, places: npt.NDArray[np.int64], identity: str) -> Key:
    import torch
    import transformers

    return Key(
        path=redact(ready.config.path),
        split=f"{ready.config.split}, log-probabilities of the base",
        parts={
            "data": ready.data.folder.name,  # determines the tokens and what is trained of them
            "settings": {
                "base": identity,
                "rows": hashlib.sha256(places.tobytes()).hexdigest(),
            },
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        },
    )
