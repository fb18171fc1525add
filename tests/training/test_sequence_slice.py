"""Ranks that hold parts of the same rows: what they count adds up to what one rank counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from app.training.objective.forward import document_numbers
from app.training.objective.sums import DatasetSums, RowSums
from app.training.routing import is_token
from common.errors import Origin
from data_modules import Batch, SequenceSlice
from data_modules.collator import Collator
from data_modules.types import Example

LENGTHS = (5, 9, 3)


def batch() -> Batch:
    """A row of three documents, and padding up to 24 tokens."""
    documents = [
        Example(
            input_ids=np.arange(3, 3 + length, dtype=np.int32),
            weights=np.arange(length, dtype=np.float32) % 3,
            dataset=number % 2,
            origin=Origin("rows.jsonl", number + 1),
        )
        for number, length in enumerate(LENGTHS)
    ]
    return Collator(0, packed=True, row_multiple=8)([documents], 1.0)


def counted(parts: list[Batch]) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Return the sums by data set and by document, and the tokens, of the ranks' parts."""
    sums, by_row = DatasetSums(2), torch.zeros(2, len(LENGTHS), dtype=torch.double)
    tokens = real = 0
    for part in parts:
        columns = part.trained_columns
        losses = part.position_ids[:, columns].flatten() + 0.5  # differs by token
        weights = part.loss_weights[:, columns].flatten()
        sums.add(losses, weights, part.dataset_ids[:, columns].flatten())
        numbers, count = document_numbers(part)
        rows = RowSums()
        rows.add(losses, weights, numbers[:, columns].flatten(), count)
        by_row += rows.take(range(count), count)
        tokens += part.num_tokens
        real += int(is_token(part).sum())
    return sums.take(), by_row, tokens, real


@pytest.mark.parametrize("size", [1, 4, 7, 18])
def test_the_parts_of_rows_add_up(size: int) -> None:
    whole = batch()
    length = whole.input_ids.shape[1]
    bounds = [(start, min(start + size, length)) for start in range(0, length, size)]
    parts = [whole.part(SequenceSlice(*bound)) for bound in bounds]
    for found, expected in zip(counted(parts), counted([whole]), strict=True):
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected))
    assert torch.cat([part.input_ids for part in parts], 1).equal(whole.input_ids)
    assert all(part.document_lengths == whole.document_lengths for part in parts)


def test_parts_are_not_split_again() -> None:
    part = batch().part(SequenceSlice(0, 4))
    with pytest.raises(ValueError, match="whole rows"):
        part.part(SequenceSlice(0, 2))
