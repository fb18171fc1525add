"""The documents of a batch as index tensors, by which layers attend inside each of them.

Causal models read one sequence, in which a token sees its document's past. Encoder-decoder models
have three attentions, each with its own groups: the encoder's (a source sees all of itself), the
decoder's (a target sees its past), and cross-attention (a target sees its own source).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

Lengths = Sequence[Sequence[int]]
"""document lengths by row"""

MAX_PADDED_SHARE = 1.25
"""limit of the work for padded over real tokens, up to which documents are batched together"""
SHORT_TOKENS = 64
"""up to this length, calling a kernel takes longer than computing a document"""
STACK_TOKENS = 1024
"""tokens of short documents that are computed together while they fit into the CPU cache"""
FREE_PADDING = 1024
"""query-key pairs of padding that a document may add besides: fewer, larger calls"""


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor in host memory to `device`; no batch waits for what a GPU still computes."""
    if device.type == "cuda":  # it copies beside its work from page-locked memory only
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class DocumentSpan(NamedTuple):
    """Position of a document: its row, its first column and the one after its last."""

    row: int
    start: int
    end: int

    @property
    def length(self) -> int:
        """Return its number of tokens."""
        return self.end - self.start


@dataclass(kw_only=True)
class DocumentGroups:
    """The documents of a batch, grouped by similar length; indices are cached on first use."""

    documents: list[DocumentSpan]
    rows: int
    tokens: int
    """tokens of a row"""
    device: torch.device

    @cached_property
    def stacks(self) -> list[list[DocumentSpan]]:
        """Groups of documents that are computed together without gathering: short ones only."""
        return stack_documents(self.documents)

    @cached_property
    def gather(self) -> list[torch.Tensor]:
        """Flat positions (row * tokens + column) of each group, [documents, longest].

        A shorter document is padded by repeating its last token, which no real token can see.
        """
        return self._indices[0]

    @cached_property
    def restore(self) -> torch.Tensor:
        """Index of each flat position into the concatenated group outputs, [rows * tokens]."""
        return self._indices[1]

    @cached_property
    def boundaries(self) -> dict[str, Any]:
        """Where documents begin, counted through all rows, by transformers' names for kernels.

        `cu_seq_lens_q`, `cu_seq_lens_k` int32 [documents + 1]: the ends; `seq_idx` int32
        [1, rows * tokens]: the number of each token's document.
        """
        import torch

        lengths = torch.tensor([0, *(one.length for one in self.documents)])
        ends = to_device(lengths.cumsum(0, dtype=torch.int32), self.device)
        numbers = torch.arange(len(self.documents), dtype=torch.int32)
        longest = max(one.length for one in self.documents)
        return {
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
            "max_length_q": longest,
            "max_length_k": longest,
            "seq_idx": to_device(numbers.repeat_interleave(lengths[1:])[None], self.device),
        }

    @cached_property
    def _indices(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        import torch

        gather, first_slot = [], 0
        restore = torch.empty(self.rows * self.tokens, dtype=torch.int64)
        for members in _of_similar_length(self.documents):
            lengths = torch.tensor([one.length for one in members]).unsqueeze(1)
            starts = torch.tensor([one.row * self.tokens + one.start for one in members])
            columns = torch.arange(members[0].length).unsqueeze(0)
            index = starts.unsqueeze(1) + torch.minimum(columns, lengths - 1)
            for number, one in enumerate(members):
                first, slot = (
                    one.row * self.tokens + one.start,
                    first_slot + number * len(columns[0]),
                )
                restore[first : first + one.length] = torch.arange(slot, slot + one.length)
            first_slot += index.numel()
            gather.append(to_device(index, self.device))
        return gather, to_device(restore, self.device)


def group_documents(
    document_lengths: Lengths, shape: tuple[int, int], device: torch.device
) -> DocumentGroups | None:
    """Group a batch's documents by length; None when every row is one document.

    The padding of a row counts as one more document.
    """
    if all(len(lengths) == 1 for lengths in document_lengths):
        return None
    rows, tokens = shape
    documents = place_documents(document_lengths, tokens)
    return DocumentGroups(documents=documents, rows=rows, tokens=tokens, device=device)


def place_documents(document_lengths: Lengths, tokens: int) -> list[DocumentSpan]:
    """Return the position of each document, row by row.

    The padding of a row counts as one more document.
    """
    placed = []
    for row, lengths in enumerate(document_lengths):
        start = 0
        for length in (*lengths, tokens - sum(lengths)):
            if length:
                placed.append(DocumentSpan(row, start, start + length))
            start += length
    return placed


def stack_documents(documents: Sequence[DocumentSpan]) -> list[list[DocumentSpan]]:
    """Group short documents of similar length; a long one forms its own group."""
    short = [one for one in documents if one.length <= SHORT_TOKENS]
    alone = [[one] for one in documents if one.length > SHORT_TOKENS]
    return alone + _of_similar_length(short, STACK_TOKENS)


def _of_similar_length(
    documents: Sequence[DocumentSpan], max_tokens: float = math.inf
) -> list[list[DocumentSpan]]:
    """Group documents, longest first, so that padding to one length costs little."""
    groups: list[list[DocumentSpan]] = []
    real = 0
    for one in sorted(documents, key=lambda one: -one.length):
        padded = groups[-1][0].length * (len(groups[-1]) + 1) if groups else math.inf
        if padded > max_tokens or padded > MAX_PADDED_SHARE * (real + one.length):
            groups.append([])
            real = 0
        groups[-1].append(one)
        real += one.length
    return groups


@dataclass(slots=True)
class PairGroup:
    """Documents of similar lengths, computed as one dense batch.

    `queries`, `keys` [documents, longest]: flat positions (row * tokens + column); a shorter
    document is padded by repeating its last token. `visible` bool [documents, 1, 1, longest]: False
    at padded keys, None where there are none.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    visible: torch.Tensor | None


@dataclass(slots=True)
class BidirectionalGroups:
    """Groups of documents whose queries see all of their keys.

    `restore` [rows * tokens]: index of each flat query into the concatenated group outputs. Padding
    gets the first output: no layer reads it, and it has no loss.
    """

    groups: list[PairGroup]
    restore: torch.Tensor


@dataclass(slots=True)
class PairGroups:
    """The groups of each attention; None where every row is one document."""

    encoder: BidirectionalGroups | None
    decoder: DocumentGroups | None
    cross: BidirectionalGroups | None
    cut: tuple[torch.Tensor, torch.Tensor] | None = None
    """the last relative position bias, and its slice for the longest document"""


class Span(NamedTuple):
    """A document in one sequence: number of tokens, and flat position of the first."""

    length: int
    start: int


def group_pairs(
    source_lengths: Lengths,
    target_lengths: Lengths,
    source_shape: tuple[int, int],
    target_shape: tuple[int, int],
    device: torch.device,
) -> PairGroups:
    """Group a batch's documents for all layers; shapes are (rows, tokens) of source and target."""
    sources = _spans(source_lengths, source_shape)
    targets = _spans(target_lengths, target_shape)
    if not sources:  # a micro-batch without documents: each row counts as one
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
) -> BidirectionalGroups:
    import torch

    documents = sorted(zip(queries, keys, strict=True), key=lambda pair: (pair[1], pair[0]))[::-1]
    groups, restore, first_slot = [], torch.zeros(num_queries, dtype=torch.int64), 0
    while documents:
        members, documents = _take_similar(documents)
        query_index, is_query = _index([query for query, _ in members])
        key_index, is_key = _index([key for _, key in members])
        slots = first_slot + torch.arange(query_index.numel()).view_as(query_index)
        restore[query_index[is_query]] = slots[is_query]
        first_slot += query_index.numel()
        visible = None if is_key.all() else to_device(is_key[:, None, None], device)
        groups.append(
            PairGroup(
                to_device(query_index, device),
                to_device(key_index, device),
                visible,
            )
        )
    return BidirectionalGroups(groups, to_device(restore, device))


def _take_similar(
    documents: list[tuple[Span, Span]],
) -> tuple[list[tuple[Span, Span]], list[tuple[Span, Span]]]:
    """Split off the first documents, sorted by key length, that may be padded to one size."""
    longest_query, real = 0, 0
    longest_key = documents[0][1].length
    for size, (query, key) in enumerate(documents, start=1):
        longest_query = max(longest_query, query.length)
        real += query.length * key.length
        if longest_query * longest_key * size > MAX_PADDED_SHARE * real + FREE_PADDING * size:
            return documents[: size - 1], documents[size - 1 :]
    return documents, []


def _index(spans: list[Span]) -> tuple[torch.Tensor, torch.Tensor]:
    """Flat positions [documents, longest], and which of them are not padding."""
    import torch

    lengths = torch.tensor([span.length for span in spans]).unsqueeze(1)
    starts = torch.tensor([span.start for span in spans]).unsqueeze(1)
    columns = torch.arange(max(span.length for span in spans)).unsqueeze(0)
    return starts + torch.minimum(columns, lengths - 1), columns < lengths
