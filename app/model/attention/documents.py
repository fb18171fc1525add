"""Index tensors of a batch's documents, with which layers attend inside each document.

In causal models, a token sees the past of its document. Encoder-decoder models have three kinds of
attention, each with its own groups of documents: the encoder's (a source sees all of itself), the
decoder's (a target sees its own past), and cross-attention (a target sees its own source).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

if TYPE_CHECKING:
    from app.model.attention.attend import MaskRule

Lengths = Sequence[Sequence[int]]
"""document lengths by row"""

MAX_PADDED_RATIO = 1.25
"""largest ratio of padded to real work up to which documents are batched together"""
SHORT_TOKENS = 64
"""length up to which launching a kernel takes longer than computing a document"""
STACK_TOKENS = 1024
"""most tokens of short documents computed together, so that they fit into the CPU's cache"""
_FREE_PADDING = 1024
"""query-key pairs of padding that each document may add on top, for fewer and larger calls"""


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor in host memory to `device`, without waiting for a GPU's queued work."""
    if device.type == "cuda":  # copies are asynchronous only from pinned memory
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class DocumentSpan(NamedTuple):
    """Position of a document: its row, its first column, and the column after its last."""

    row: int
    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start


@dataclass(kw_only=True)
class DocumentGroups:
    """The documents of a batch, grouped by similar length; indices are cached on first use."""

    documents: list[DocumentSpan]
    rows: int
    tokens: int
    """tokens per row"""
    device: torch.device

    @cached_property
    def stacks(self) -> list[list[DocumentSpan]]:
        """Groups of short documents that are computed together; a long document is a group."""
        return stack_documents(self.documents)

    @cached_property
    def gather(self) -> list[Tensor]:
        """Flat positions (row * tokens + column) of each group, [documents, longest].

        A shorter document is padded by repeating its last token, which no earlier token sees.
        """
        return self._indices[0]

    @cached_property
    def restore(self) -> Tensor:
        """Index of each flat position into the concatenated group outputs, [rows * tokens]."""
        return self._indices[1]

    @cached_property
    def boundaries(self) -> dict[str, Any]:
        """The arguments of `boundary_arguments`, and each token's document for Mamba's kernels.

        `seq_idx` int32 [1, rows * tokens]: number of the document.
        """
        lengths = [document.length for document in self.documents]
        numbers = torch.arange(len(lengths), dtype=torch.int32)
        seq_idx = numbers.repeat_interleave(torch.tensor(lengths))[None]
        return boundary_arguments(self.documents, self.device) | {
            "seq_idx": to_device(seq_idx, self.device)
        }

    @cached_property
    def _indices(self) -> tuple[list[Tensor], Tensor]:
        groups = [
            _index([Span(each.length, each.row * self.tokens + each.start) for each in members])
            for members in _group_by_length(self.documents)
        ]
        restore = _inverse(groups, self.rows * self.tokens)
        gather = [to_device(index, self.device) for index, _ in groups]
        return gather, to_device(restore, self.device)


def group_documents(
    document_lengths: Lengths, shape: tuple[int, int], device: torch.device
) -> DocumentGroups | None:
    """Group a batch's documents by length; None if every row is one document.

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


class RowPiece(NamedTuple):
    """Neighbouring tokens of a row: a part of a document, or the documents that begin in them."""

    row: int
    columns: range
    first: int
    """first column to which the tokens attend: before theirs for a document that continues"""
    begun: list[int]
    """tokens of each document that begins in them, padding included; empty for one that continues
    """


def place_in_chunks(
    document_lengths: Lengths, tokens: int, chunks: Sequence[range]
) -> list[RowPiece]:
    """Return what chunks of the columns of rows of `tokens` hold of documents, row by row."""
    pieces = []
    for row, lengths in enumerate(document_lengths):
        documents = place_documents([lengths], tokens)
        for chunk in chunks:
            begun = []
            for _, first, end in documents:
                if end <= chunk.start or first >= chunk.stop:
                    continue
                end = min(end, chunk.stop)
                if first < chunk.start:
                    pieces.append(RowPiece(row, range(chunk.start, end), first, []))
                else:
                    begun.append(end - first)
            if begun:
                first = chunk.stop - sum(begun)
                pieces.append(RowPiece(row, range(first, chunk.stop), first, begun))
    return pieces


def boundary_arguments(documents: Sequence[DocumentSpan], device: torch.device) -> dict[str, Any]:
    """Return the boundaries of documents, counted through all rows, by transformers' names.

    `cu_seq_lens_q`, `cu_seq_lens_k` int32 [documents + 1]: start of each document, end of the last.
    """
    lengths = [document.length for document in documents]
    boundaries = to_device(torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32), device)
    return {
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def stack_documents(documents: Sequence[DocumentSpan]) -> list[list[DocumentSpan]]:
    """Group short documents of similar length; a long document is a group of its own."""
    short = [document for document in documents if document.length <= SHORT_TOKENS]
    long = [[document] for document in documents if document.length > SHORT_TOKENS]
    return long + _group_by_length(short, STACK_TOKENS)


def _group_by_length(
    documents: Sequence[DocumentSpan], max_tokens: float = math.inf
) -> list[list[DocumentSpan]]:
    groups: list[list[DocumentSpan]] = []
    real = 0
    for document in sorted(documents, key=lambda document: -document.length):
        padded = groups[-1][0].length * (len(groups[-1]) + 1) if groups else math.inf
        if padded > max_tokens or padded > MAX_PADDED_RATIO * (real + document.length):
            groups.append([])
            real = 0
        groups[-1].append(document)
        real += document.length
    return groups


@dataclass(kw_only=True, slots=True)
class RowSlices:
    """The ranks that hold slices of a batch's rows, and the documents in this rank's slice."""

    ranks: ProcessGroup
    pieces: list[RowPiece]
    """this rank's tokens, row by row"""
    begun: dict[str, Any]
    """arguments of attention that keep apart the documents that begin in the pieces, joined into
    one row; empty without any"""
    rules: dict[int, MaskRule] = field(default_factory=dict)
    """by window, the masks that layers without a mask rule of their own share"""


@dataclass(slots=True)
class PairGroup:
    """Documents of similar lengths, computed as one dense batch.

    A shorter document is padded by repeating its last token.
    """

    queries: Tensor
    """flat positions (row * tokens + column), [documents, longest]"""
    keys: Tensor
    """flat positions, [documents, longest]"""
    visible: Tensor | None
    """bool [documents, 1, 1, longest], False at padded keys; None if no key is padded"""


@dataclass(slots=True)
class BidirectionalGroups:
    """Groups of documents whose queries see all of their keys."""

    groups: list[PairGroup]
    restore: Tensor
    """index of each flat query into the concatenated group outputs, [rows * tokens]; padding gets
    the first output, which no layer reads"""


@dataclass(slots=True)
class PairGroups:
    """Groups of an encoder-decoder model, by attention; None if every row is one document."""

    encoder: BidirectionalGroups | None
    decoder: DocumentGroups | None
    cross: BidirectionalGroups | None
    sliced_bias: tuple[Tensor, Tensor] | None = None
    """latest relative position bias, and its slice for the longest document"""


class Span(NamedTuple):
    """A document's number of tokens, and the flat position of its first token."""

    length: int
    start: int


def group_pairs(
    source_lengths: Lengths,
    target_lengths: Lengths,
    source_shape: tuple[int, int],
    target_shape: tuple[int, int],
    device: torch.device,
) -> PairGroups:
    """Group a batch's pairs of source and target; shapes are (rows, tokens)."""
    sources = _spans(source_lengths, source_shape)
    targets = _spans(target_lengths, target_shape)
    if not sources:  # in a micro-batch without documents, each row counts as one
        sources = [Span(source_shape[1], row * source_shape[1]) for row in range(source_shape[0])]
        targets = [Span(target_shape[1], row * target_shape[1]) for row in range(target_shape[0])]
    source_tokens, target_tokens = (rows * tokens for rows, tokens in (source_shape, target_shape))
    decoder = group_documents(target_lengths, target_shape, device)
    are_rows = [span.length for span in sources] == [source_shape[1]] * source_shape[0]
    if are_rows and decoder is None:
        return PairGroups(None, None, None)
    return PairGroups(
        None if are_rows else _group_bidirectional(sources, sources, source_tokens, device),
        decoder,
        _group_bidirectional(targets, sources, target_tokens, device),
    )


def _spans(lengths: Lengths, shape: tuple[int, int]) -> list[Span]:
    spans = []
    for row, documents in enumerate(lengths):
        start = row * shape[1]
        for length in documents:
            spans.append(Span(length, start))
            start += length
    return spans


def _group_bidirectional(
    queries: list[Span], keys: list[Span], num_queries: int, device: torch.device
) -> BidirectionalGroups:
    documents = sorted(zip(queries, keys, strict=True), key=lambda pair: (pair[1], pair[0]))[::-1]
    groups, indices = [], []
    while documents:
        members, documents = _take_similar(documents)
        indices.append(_index([query for query, _ in members]))
        key_index, is_key = _index([key for _, key in members])
        visible = None if is_key.all() else to_device(is_key[:, None, None], device)
        positions = to_device(indices[-1][0], device), to_device(key_index, device)
        groups.append(PairGroup(*positions, visible))
    return BidirectionalGroups(groups, to_device(_inverse(indices, num_queries), device))


def _take_similar(
    documents: list[tuple[Span, Span]],
) -> tuple[list[tuple[Span, Span]], list[tuple[Span, Span]]]:
    """Split off the first documents that may be padded to one size; sorted by key length."""
    longest_query, real = 0, 0
    longest_key = documents[0][1].length
    for size, (query, key) in enumerate(documents, start=1):
        longest_query = max(longest_query, query.length)
        real += query.length * key.length
        if longest_query * longest_key * size > MAX_PADDED_RATIO * real + _FREE_PADDING * size:
            return documents[: size - 1], documents[size - 1 :]
    return documents, []


def _index(spans: list[Span]) -> tuple[Tensor, Tensor]:
    """Return flat positions [documents, longest], and a mask of those that are not padding."""
    lengths = torch.tensor([span.length for span in spans]).unsqueeze(1)
    starts = torch.tensor([span.start for span in spans]).unsqueeze(1)
    columns = torch.arange(max(span.length for span in spans)).unsqueeze(0)
    return starts + torch.minimum(columns, lengths - 1), columns < lengths


def _inverse(groups: Sequence[tuple[Tensor, Tensor]], num_positions: int) -> Tensor:
    """Return the place of each flat position in the concatenated groups of `_index`; 0 if none."""
    # Padding repeats a document's last token, behind it: the first place is the token's own.
    positions = torch.cat([index.flatten() for index, _ in groups])
    none = len(positions)
    places = torch.full((num_positions,), none)
    places.scatter_reduce_(0, positions, torch.arange(none), "amin")
    return places.masked_fill(places == none, 0)
