"""Documents of two sequences: what an encoder reads, and what a decoder writes behind it.

A model has three kinds of attention, each with its own groups: the encoder's (a source sees all of
itself), the decoder's (a target sees its past), and across (a target sees its own source).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from app.model.attention.documents import MAX_PADDED_SHARE, DocumentGroups, group_documents

if TYPE_CHECKING:
    import torch

Lengths = Sequence[Sequence[int]]

FREE_PADDING = 1024
"""padded pairs of query and key that a document may cost besides: fewer, larger calls"""


@dataclass(slots=True)
class Group:
    """Documents of like lengths, to be attended to as one dense batch.

    `queries`, `keys` [documents, longest]: flat positions (row * tokens + column); the padding at a
    short document's end repeats its last token. `visible` bool [documents, 1, 1, longest]: the keys
    that are no such padding, None where all documents have the same.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    visible: torch.Tensor | None


@dataclass(slots=True)
class SeenWhole:
    """Groups of documents whose queries see all of their keys.

    `restore` [rows * tokens]: where each flat query's output lies in the groups' outputs. Padding
    gets the output of the first one: no layer looks at it, nothing is learned from it.
    """

    groups: list[Group]
    restore: torch.Tensor


@dataclass(slots=True)
class PairGroups:
    """The groups of each kind of attention; None where every row is one whole document."""

    encoder: SeenWhole | None
    decoder: DocumentGroups | None
    cross: SeenWhole | None
    cut: tuple[torch.Tensor, torch.Tensor] | None = None
    """the bias by distance that a layer came with last, and its part for the longest document"""


class Span(NamedTuple):
    """A document's part of one side: its tokens, and the flat position of the first."""

    length: int
    start: int


def group_pairs(
    source_lengths: Lengths,
    target_lengths: Lengths,
    source_shape: tuple[int, int],
    target_shape: tuple[int, int],
    device: torch.device,
) -> PairGroups:
    """Group a batch's documents for all layers; shapes are (rows, tokens) of the two sides.

    A source's padding is never seen.
    """
    sources = _spans(source_lengths, source_shape)
    targets = _spans(target_lengths, target_shape)
    if not sources:  # a micro-batch without documents: its rows stand for some
        sources = [Span(source_shape[1], row * source_shape[1]) for row in range(source_shape[0])]
        targets = [Span(target_shape[1], row * target_shape[1]) for row in range(target_shape[0])]
    source_tokens, target_tokens = (rows * tokens for rows, tokens in (source_shape, target_shape))
    decoder = group_documents(target_lengths, target_shape, device)
    are_rows = [span.length for span in sources] == [source_shape[1]] * source_shape[0]
    if are_rows and decoder is None:
        return PairGroups(None, None, None)
    return PairGroups(
        None if are_rows else _group(sources, sources, source_tokens, device),
        decoder,
        _group(targets, sources, target_tokens, device),
    )


def _spans(lengths: Lengths, shape: tuple[int, int]) -> list[Span]:
    spans = []
    for row, documents in enumerate(lengths):
        start = row * shape[1]
        for length in documents:
            spans.append(Span(length, start))
            start += length
    return spans


def _group(
    queries: list[Span], keys: list[Span], num_queries: int, device: torch.device
) -> SeenWhole:
    import torch

    documents = sorted(zip(queries, keys, strict=True), key=lambda pair: (pair[1], pair[0]))[::-1]
    groups, restore, first_slot = [], torch.zeros(num_queries, dtype=torch.int64), 0
    while documents:
        members, documents = _take_alike(documents)
        query_index, is_query = _index([query for query, _ in members])
        key_index, is_key = _index([key for _, key in members])
        slots = first_slot + torch.arange(query_index.numel()).view_as(query_index)
        restore[query_index[is_query]] = slots[is_query]
        first_slot += query_index.numel()
        visible = None if is_key.all() else is_key[:, None, None].to(device, non_blocking=True)
        groups.append(
            Group(
                query_index.to(device, non_blocking=True),
                key_index.to(device, non_blocking=True),
                visible,
            )
        )
    return SeenWhole(groups, restore.to(device, non_blocking=True))


def _take_alike(
    documents: list[tuple[Span, Span]],
) -> tuple[list[tuple[Span, Span]], list[tuple[Span, Span]]]:
    """Split off the first documents that may be padded to one size; sorted by keys' length."""
    longest_query, real = 0, 0
    longest_key = documents[0][1].length
    for size, (query, key) in enumerate(documents, start=1):
        longest_query = max(longest_query, query.length)
        real += query.length * key.length
        if longest_query * longest_key * size > MAX_PADDED_SHARE * real + FREE_PADDING * size:
            return documents[: size - 1], documents[size - 1 :]
    return documents, []


def _index(spans: list[Span]) -> tuple[torch.Tensor, torch.Tensor]:
    """Flat positions [documents, longest], and where they are a document's own."""
    import torch

    lengths = torch.tensor([span.length for span in spans]).unsqueeze(1)
    starts = torch.tensor([span.start for span in spans]).unsqueeze(1)
    columns = torch.arange(max(span.length for span in spans)).unsqueeze(0)
    return starts + torch.minimum(columns, lengths - 1), columns < lengths
