"""Documents of one sequence, each of whose tokens sees its document's past: causal models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

MAX_PADDED_SHARE = 1.25
"""documents are attended to together while padding them to one length costs at most this factor"""


class Document(NamedTuple):
    """Where a document stands: its row, its first column and the one behind its last."""

    row: int
    start: int
    end: int


@dataclass(slots=True)
class DocumentGroups:
    """Documents of like length, to be attended to as dense causal batches; or one at a time.

    `gather[i]` [documents, longest]: flat positions (row * tokens + column) of group i's tokens;
    the padding at a short document's end repeats its last token, which no real token can see.
    `restore` [rows * tokens]: where each flat position's output lies in the groups' outputs.
    `documents`: the same ones where they stand.
    """

    gather: list[torch.Tensor]
    restore: torch.Tensor
    documents: list[Document]


def group_documents(
    document_lengths: Sequence[Sequence[int]], shape: tuple[int, int], device: torch.device
) -> DocumentGroups | None:
    """Group a batch's documents by length; None when every row is one document.

    What lies beyond a row's documents is padding and counts as one more document of that row.
    """
    import torch

    if all(len(lengths) == 1 for lengths in document_lengths):
        return None
    rows, tokens = shape
    placed = place_documents(document_lengths, tokens)
    documents = [(one.end - one.start, one.row * tokens + one.start) for one in placed]
    documents.sort(reverse=True)

    gather, restore, first_slot = [], torch.empty(rows * tokens, dtype=torch.int64), 0
    while documents:
        longest, real = documents[0][0], 0
        size = 0
        for size, (length, _) in enumerate(documents, start=1):
            real += length
            if longest * size > MAX_PADDED_SHARE * real:
                size -= 1
                break
        members, documents = documents[:size], documents[size:]
        lengths = torch.tensor([length for length, _ in members]).unsqueeze(1)
        starts = torch.tensor([start for _, start in members]).unsqueeze(1)
        columns = torch.arange(longest).unsqueeze(0)
        index = starts + torch.minimum(columns, lengths - 1)
        slots = first_slot + torch.arange(index.numel()).view_as(index)
        is_real = columns < lengths
        restore[index[is_real]] = slots[is_real]
        first_slot += index.numel()
        gather.append(index.to(device, non_blocking=True))
    return DocumentGroups(gather, restore.to(device, non_blocking=True), placed)


def place_documents(document_lengths: Sequence[Sequence[int]], tokens: int) -> list[Document]:
    """Return where each document stands, row by row, one behind the other.

    What lies beyond a row's documents is padding and counts as one more document of that row.
    """
    placed = []
    for row, lengths in enumerate(document_lengths):
        start = 0
        for length in (*lengths, tokens - sum(lengths)):
            if length:
                placed.append(Document(row, start, start + length))
            start += length
    return placed
