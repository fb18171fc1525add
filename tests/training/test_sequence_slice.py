"""Ranks that hold parts of the same rows: what they count adds up to what one rank counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from app.model.attention.documents import place_in_chunks
from app.training.objective.objective import DatasetSums, RowSums, document_numbers
from app.training.routing import is_token
from common.errors import Origin
from data_modules import Batch, SequenceSlice, deal_columns
from data_modules.collator import MIN_CHUNK, Collator
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


@pytest.mark.parametrize("size", [1, 2, 4, 6, 12])
def test_the_parts_of_rows_add_up(size: int) -> None:
    whole = batch()
    dealt = deal_columns(whole.input_ids.shape[1], size)
    parts = [whole.part(SequenceSlice(chunks)) for chunks in dealt]
    for found, expected in zip(counted(parts), counted([whole]), strict=True):
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected))
    columns = torch.tensor([column for chunks in dealt for each in chunks for column in each])
    assert torch.cat([part.input_ids for part in parts], 1).equal(whole.input_ids[:, columns])
    assert all(part.document_lengths == whole.document_lengths for part in parts)


def pairs_by_rank(lengths: list[int], tokens: int, dealt: list[list[range]]) -> list[int]:
    """Return the causal pairs of tokens of documents that each rank computes."""
    counts = []
    for chunks in dealt:
        pieces = place_in_chunks([lengths], tokens, chunks)
        continued = (piece for piece in pieces if not piece.begun)
        begun = (length for piece in pieces for length in piece.begun)
        spans = [
            (each.columns.start - each.first, each.columns.stop - each.first) for each in continued
        ]
        spans += [(0, length) for length in begun]
        counts.append(sum(end * (end + 1) - start * (start + 1) for start, end in spans) // 2)
    return counts


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_ranks_get_each_token_once_and_as_many_pairs_of_a_long_document(size: int) -> None:
    random = np.random.default_rng(size)
    for _ in range(20):
        tokens = 2 * size * int(random.integers(1, 4 * MIN_CHUNK))
        dealt = deal_columns(tokens, size)
        columns = [column for chunks in dealt for chunk in chunks for column in chunk]
        assert sorted(columns) == list(range(tokens))
        assert all(chunks == sorted(chunks, key=min) for chunks in dealt)
        assert {sum(map(len, chunks)) for chunks in dealt} == {tokens // size}
        assert len(set(pairs_by_rank([tokens], tokens, dealt))) == 1
        ends = np.sort(random.integers(0, tokens + 1, 4)).tolist()
        lengths = [end - begin for begin, end in zip([0, *ends], ends, strict=False) if end > begin]
        documents = [*lengths, tokens - sum(lengths)]
        pairs = pairs_by_rank(lengths, tokens, dealt)
        assert sum(pairs) == sum(length * (length + 1) // 2 for length in documents)
        assert max(pairs) - min(pairs) < tokens // size * max(documents)


@pytest.mark.parametrize(
    ("size", "dealt", "contiguous"), [(2, 1.10, 1.21), (4, 1.17, 1.59), (8, 1.21, 2.06)]
)
def test_the_slowest_rank_of_packs_of_long_documents_waits_little(
    size: int, dealt: float, contiguous: float
) -> None:
    """The figures of docs/choosing.md: pairs of the slowest rank by those of the mean one."""
    random, tokens = np.random.default_rng(0), 131072
    width, slowest, mean = tokens // size, np.zeros(2), 0.0
    ways = (
        deal_columns(tokens, size),
        [[range(start, start + width)] for start in range(0, tokens, width)],
    )
    last = [
        sum(len(each) for each in chunks if each.start >= 7 * tokens // 8) for chunks in ways[0]
    ]
    assert last == [tokens // (8 * size)] * size  # of an answer there, each rank has as much
    for _ in range(1000):
        lengths: list[int] = []
        while (length := int(2 ** random.uniform(13, 16))) + sum(lengths) <= tokens:
            lengths.append(length)
        pairs = [pairs_by_rank(lengths, tokens, way) for way in ways]
        slowest += [max(each) for each in pairs]
        mean += sum(pairs[0]) / size
    assert slowest / mean == pytest.approx([dealt, contiguous], abs=0.005)


def test_parts_are_not_split_again() -> None:
    part = batch().part(SequenceSlice([range(4)]))
    with pytest.raises(ValueError, match="whole rows"):
        part.part(SequenceSlice([range(2)]))
