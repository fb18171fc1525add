"""Documents of one sequence, each of whose tokens sees its document's past: causal models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

MAX_PADDED_SHARE = 1.25
"""documents are attended to together while padding them to one length costs at most this factor"""
SHORT_TOKENS = 64
"""up to here a document takes less time to compute than to call for"""
STACK_TOKENS = 1024
"""tokens of short documents that are computed together, and stay in the cache"""


class Document(NamedTuple):
    """Where a document stands: its row, its first column and the one behind its last."""

    row: int
    start: int
    end: int

    @property
    def length(self) -> int:
        """Return its number of tokens."""
        return self.end - self.start


@dataclass(kw_only=True)
class DocumentGroups:
    """The documents of a batch, and those of like length together.

    What one way of attending needs of them is computed when it is first asked for, and then kept
    for all layers.
    """

    documents: list[Document]
    rows: int
    tokens: int
    """of a row"""
    device: torch.device

    @cached_property
    def stacks(self) -> list[list[Document]]:
        """Documents that are attended to together without gathering them: short ones."""
        return stack_documents(self.documents)

    @cached_property
    def gather(self) -> list[torch.Tensor]:
        """For each group [documents, longest]: flat positions (row * tokens + column).

        The padding at a short document's end repeats its last token, which no real token can see.
        """
        return self._indices[0]

    @cached_property
    def restore(self) -> torch.Tensor:
        """Where each flat position's output lies in the groups' outputs; [rows * tokens]."""
        return self._indices[1]

    @cached_property
    def _indices(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        import torch

        gather, first_slot = [], 0
        restore = torch.empty(self.rows * self.tokens, dtype=torch.int64)
        for members in _of_like_length(self.documents):
            lengths = torch.tensor([one.length for one in members]).unsqueeze(1)
            starts = torch.tensor([one.row * self.tokens + one.start for one in members])
            columns = torch.arange(members[0].length).unsqueeze(0)
            index = starts.unsqueeze(1) + torch.minimum(columns, lengths - 1)
            slots = first_slot + torch.arange(index.numel()).view_as(index)
            is_real = columns < lengths
            restore[index[is_real]] = slots[is_real]
            first_slot += index.numel()
            gather.append(index.to(self.device, non_blocking=True))
        return gather, restore.to(self.device, non_blocking=True)


def group_documents(
    document_lengths: Sequence[Sequence[int]], shape: tuple[int, int], device: torch.device
) -> DocumentGroups | None:
    """Group a batch's documents by length; None when every row is one document.

    What lies beyond a row's documents is padding and counts as one more document of that row.
    """
    if all(len(lengths) == 1 for lengths in document_lengths):
        return None
    rows, tokens = shape
    documents = place_documents(document_lengths, tokens)
    return DocumentGroups(documents=documents, rows=rows, tokens=tokens, device=device)


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


def stack_documents(documents: Sequence[Document]) -> list[list[Document]]:
    """Put short documents of like length together; a long one stands alone."""
    short = [one for one in documents if one.length <= SHORT_TOKENS]
    alone = [[one] for one in documents if one.length > SHORT_TOKENS]
    return alone + _of_like_length(short, STACK_TOKENS)


def _of_like_length(
    documents: Sequence[Document], max_tokens: float = math.inf
) -> list[list[Document]]:
    """Group documents, longest first, so that padding them to one length costs little."""
    groups: list[list[Document]] = []
    real = 0
    for one in sorted(documents, key=lambda one: -one.length):
        padded = groups[-1][0].length * (len(groups[-1]) + 1) if groups else math.inf
        if padded > max_tokens or padded > MAX_PADDED_SHARE * (real + one.length):
            groups.append([])
            real = 0
        groups[-1].append(one)
        real += one.length
    return groups
