"""Lay the documents of a micro-batch out as tensors, packed in one row or padded.

Decides positions, labels and padding. Never decides which documents come together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from data_modules.types import Batch, Example

IGNORED = -100


class Collator:
    """Build a `Batch` from the documents of each pack of a micro-batch.

    Packed: one row [1, tokens of all packs], without padding. Padded (`packed=False`, a document
    a pack): [packs, tokens of the longest], padded on the right. A micro-batch without any
    document becomes padding only, without labels.
    """

    def __init__(self, pad_token_id: int, packed: bool) -> None:
        self._pad_token_id = pad_token_id
        self._packed = packed

    def __call__(self, packs: Sequence[Sequence[Example]], step_weight: float) -> Batch:
        """Return the batch of `packs`, one sequence of examples each."""
        if self._packed:
            rows = [[example for pack in packs for example in pack]]
        else:
            rows = [list(pack) for pack in packs]
        width = max(1, *(sum(len(e.input_ids) for e in row) for row in rows), 1)
        arrays = _Arrays.empty(len(rows), width, self._pad_token_id)
        for index, row in enumerate(rows):
            if row:
                arrays.fill(index, row)
        columns = np.flatnonzero((arrays.labels != IGNORED).any(axis=0))
        lengths = [[len(e.input_ids) for e in row] for row in rows]
        return Batch(
            input_ids=torch.from_numpy(arrays.input_ids),
            position_ids=torch.from_numpy(arrays.position_ids),
            labels=torch.from_numpy(arrays.labels),
            loss_weights=torch.from_numpy(arrays.loss_weights),
            dataset_ids=torch.from_numpy(arrays.dataset_ids),
            trained_columns=torch.from_numpy(columns if len(columns) else np.zeros(1, np.int64)),
            document_lengths=lengths,
            step_weight=step_weight,
            num_tokens=sum(map(sum, lengths)),
        )


class _Arrays:
    """Hold the arrays of a batch, [rows, tokens] each, while they are filled."""

    def __init__(
        self,
        input_ids: npt.NDArray[np.int64],
        position_ids: npt.NDArray[np.int64],
        labels: npt.NDArray[np.int64],
        loss_weights: npt.NDArray[np.float32],
        dataset_ids: npt.NDArray[np.int64],
    ) -> None:
        self.input_ids = input_ids
        self.position_ids = position_ids
        self.labels = labels
        self.loss_weights = loss_weights
        self.dataset_ids = dataset_ids

    @classmethod
    def empty(cls, rows: int, tokens: int, pad_token_id: int) -> _Arrays:
        shape = (rows, tokens)
        return cls(
            input_ids=np.full(shape, pad_token_id, dtype=np.int64),
            position_ids=np.zeros(shape, dtype=np.int64),
            labels=np.full(shape, IGNORED, dtype=np.int64),
            loss_weights=np.zeros(shape, dtype=np.float32),
            dataset_ids=np.zeros(shape, dtype=np.int64),
        )

    def fill(self, index: int, row: Sequence[Example]) -> None:
        """Lay the documents of `row` side by side into row `index`."""
        lengths = np.array([len(example.input_ids) for example in row])
        ends = np.cumsum(lengths)
        starts, total = ends - lengths, int(ends[-1])
        ids = self.input_ids[index, :total]
        np.concatenate([example.input_ids for example in row], out=ids, casting="safe")
        weights = np.concatenate([example.weights for example in row])
        # The first token of a document has nothing before it that could predict it.
        weights[starts] = 0
        self.loss_weights[index, : total - 1] = weights[1:]
        self.labels[index, : total - 1] = np.where(weights[1:] > 0, ids[1:], IGNORED)
        self.position_ids[index, :total] = np.arange(total) - np.repeat(starts, lengths)
        datasets = np.array([example.dataset for example in row])
        self.dataset_ids[index, :total] = np.repeat(datasets, lengths)
