"""Collate the documents of a micro-batch into tensors, packed into one row or padded.

Decides positions, labels and padding. Never decides which documents share a pack.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from data_modules.types import Example

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_IGNORED = -100
_MAX_ROUNDS = 4
"""most rounds in which the columns of a row are dealt to ranks"""
MIN_CHUNK = 512
"""fewest tokens of a chunk in more than one round"""
_Row = list[Example]
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DecoderInputs:
    """The decoder's inputs: its labels, shifted right behind the start token of each document.

    `input_ids`, `position_ids` int64 [rows, targets]; `document_lengths` as in `Batch`.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    document_lengths: list[list[int]]


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """The columns of whole rows that a rank holds: chunks of equal length, from left to right.

    `ranks`: those that together hold all columns.
    """

    chunks: Sequence[range]
    ranks: ProcessGroup | None = None

    @classmethod
    def of_rank(cls, num_columns: int, ranks: ProcessGroup) -> SequenceSlice:
        """Return this rank's columns of rows that are dealt to `ranks`."""
        return cls(deal_columns(num_columns, ranks.size())[ranks.rank()], ranks)

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the own columns of whole rows [rows, columns, ...]."""
        length = len(self.chunks[0])
        parts = whole.split(length, 1)  # not by slices: each would allocate a gradient of all rows
        return torch.cat([parts[chunk.start // length] for chunk in self.chunks], 1)


def deal_columns(num_columns: int, size: int) -> list[list[range]]:
    """Deal the columns of a row to `size` ranks, in chunks and zigzag order; return them by rank.

    A token attends to those before it, so each rank gets early and late ones: as many pairs of one
    long document. Several rounds also share the pairs of shorter ones, and answers at a row's end.
    """
    length, left = divmod(num_columns, 2 * size)
    assert not left, "rows are padded to a multiple of two chunks a rank"
    rounds = math.gcd(length, max(1, min(_MAX_ROUNDS, length // MIN_CHUNK)))
    length //= rounds
    by_rank: list[list[range]] = [[] for _ in range(size)]
    order = [*range(size), *reversed(range(size))] * rounds
    for number, rank in enumerate(order):
        by_rank[rank].append(range(number * length, (number + 1) * length))
    return by_rank


@dataclass(slots=True)
class Batch:
    """One micro-batch.

    input_ids        int64 [rows, tokens]
    position_ids     int64 [rows, tokens], from 0 in each document
    labels           int64 [rows, tokens], already shifted: the token that this position must
                     predict, -100 if masked
    loss_weights     float32 [rows, tokens], weight of that label, 0 where it is -100
    dataset_ids      int64 [rows, tokens], index of the data set, 0 in padding
    trained_columns  int64 [k], columns in which any row has a label; column 0 when there is none
    document_lengths tokens of each document, per row; positions beyond their sum are padding
    step_weight      sum of `loss_weights` over the whole global step (all micro-batches, all
                     ranks), a tensor if it was summed over ranks; 1.0 in validation
    num_tokens       tokens in this micro-batch that are not padding
    unit_weights     float32 [units], weight of each preference pair, or of each document with a
                     label; None for rows of trained positions. The documents of all rows, in
                     order, are the chosen and the rejected answer of the first pair, of the
                     second, ...; or a unit each
    unit_labels      float32 [units]: a class, a number, or 1 for an answer that is wanted and 0 for
                     another one; NaN for none
    others           the same prompts with answers of other rows, None without verdicts
    reference        float64, the base's log-probabilities of both answers of pairs [pairs, 2], or
                     of the answers with a verdict [answers]; or float32 [trained, 2, k], a
                     teacher's likeliest tokens and their log-probabilities at each label, in order;
                     None if nothing is stored
    decoder          the decoder's inputs, for encoder-decoder models: `input_ids`, `position_ids`
                     and `document_lengths` are then the encoder's, and `labels`, `loss_weights`,
                     `dataset_ids` and `trained_columns` [rows, targets] the decoder's
    sequence         the columns of whole rows that the tensors hold, None for all; positions and
                     `document_lengths` are those of whole rows
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    loss_weights: torch.Tensor
    dataset_ids: torch.Tensor
    trained_columns: torch.Tensor
    document_lengths: list[list[int]]
    step_weight: float | torch.Tensor
    num_tokens: int
    decoder: DecoderInputs | None = None
    sequence: SequenceSlice | None = None
    unit_weights: torch.Tensor | None = None
    unit_labels: torch.Tensor | None = None
    others: Batch | None = None
    reference: torch.Tensor | None = None

    def part(self, sequence: SequenceSlice) -> Batch:
        """Return the columns that one of several ranks holds of a causal model's batch.

        Sums over all positions of the parts are those of the batch.
        """
        if any(x is not None for x in (self.decoder, self.sequence, self.unit_weights)):
            raise ValueError("only whole rows of a causal model, of single answers, can be split")
        by_position = ("input_ids", "position_ids", "labels", "loss_weights", "dataset_ids")
        is_trained = self.trained_columns.new_zeros(1, self.labels.shape[1])
        is_trained[:, self.trained_columns] = 1
        own = sequence.take(is_trained)[0].nonzero().flatten()
        num_tokens = sum(
            len(each[: max(0, sum(lengths) - each.start)])
            for lengths in self.document_lengths
            for each in sequence.chunks
        )
        return replace(
            self,
            **{name: sequence.take(getattr(self, name)) for name in by_position},
            trained_columns=own if len(own) else own.new_zeros(1),
            num_tokens=num_tokens,
            sequence=sequence,
        )

    @property
    def num_positions(self) -> int:
        own = self.input_ids.numel() + (0 if self.decoder is None else self.labels.numel())
        return own + (0 if self.others is None else self.others.num_positions)

    @property
    def own_weight(self) -> float:
        """The weight of this micro-batch in the step weight."""
        weights = self.loss_weights if self.unit_weights is None else self.unit_weights
        return float(weights.sum())

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        return _with_tensors(self, lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        return _with_tensors(self, torch.Tensor.pin_memory)


Inputs = TypeVar("Inputs", bound="Batch | DecoderInputs")


def _with_tensors(inputs: Inputs, change: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
    """Return a copy whose tensors are changed, but not a step weight that is one."""
    changed: dict[str, Any] = {}
    for name in (field.name for field in fields(inputs) if field.name != "step_weight"):
        value = getattr(inputs, name)
        if isinstance(value, torch.Tensor):
            changed[name] = change(value)
        elif isinstance(value, (Batch, DecoderInputs)):
            changed[name] = _with_tensors(value, change)
    return replace(inputs, **changed)


class Collator:
    """Build a `Batch` from the documents of each pack of a micro-batch.

    Packed: one row [1, tokens of all packs], padded to `row_len` or to a multiple of
    `row_multiple` if given. Padded (`packed=False`, one document a pack): [packs, tokens of the
    longest], padded on the right. A micro-batch without documents is padding without labels.
    `decoder_start_token_id` starts each document of an encoder-decoder model's decoder; None for
    causal models. `has_verdicts`: examples are an answer with a verdict and that of another row.
    """

    def __init__(
        self,
        pad_token_id: int,
        packed: bool,
        decoder_start_token_id: int | None = None,
        row_len: int | None = None,
        row_multiple: int = 1,
        *,
        has_verdicts: bool = False,
    ) -> None:
        self._pad_token_id = pad_token_id
        self._has_verdicts = has_verdicts
        self._packed = packed
        self._decoder_start = decoder_start_token_id
        self._row_len, self._row_multiple = row_len or 1, row_multiple

    def __call__(self, packs: Sequence[Sequence[Example]], step_weight: float) -> Batch:
        documents = [[example.documents() for example in pack] for pack in packs]
        examples = [one for pack in packs for one in pack]
        units = [one for one in examples if one.is_unit]
        weights = torch.tensor([float(unit.weights.max()) for unit in units])
        labels = torch.tensor([math.nan if one.label is None else one.label for one in units])
        stored = [one.reference for one in units or examples if one.reference is not None]
        join = np.stack if units else np.concatenate
        reference = torch.from_numpy(join(stored)) if stored else None
        if not self._has_verdicts:
            whole = [[one for each in pack for one in each] for pack in documents]
            batch = self._collate(whole, step_weight, one_by_row=bool(units))
            if not units:
                return replace(batch, reference=reference)
            return replace(batch, unit_weights=weights, unit_labels=labels, reference=reference)
        own, others = (
            self._collate([[each[side] for each in pack] for pack in documents], step_weight)
            for side in (0, 1)
        )
        if reference is not None:
            others = replace(others, reference=reference[:, 1])
        return replace(
            own,
            num_tokens=own.num_tokens + others.num_tokens,
            unit_weights=weights,
            unit_labels=labels,
            others=others,
            reference=None if reference is None else reference[:, 0],
        )

    def _collate(
        self, documents: list[_Row], step_weight: float, *, one_by_row: bool = False
    ) -> Batch:
        if self._packed:
            rows = [[document for pack in documents for document in pack]]
        elif one_by_row:
            rows = [[document] for pack in documents for document in pack]
        else:
            rows = documents
        inputs = _TokenRows(rows, attrgetter("input_ids"), self._row_len, self._row_multiple)
        ids = inputs.token_ids(self._pad_token_id)
        decoder = None
        labelled = inputs
        if self._decoder_start is None:
            weights = inputs.weights()
            for row in range(len(weights)):
                # No position predicts the first token of a document.
                weights[row, inputs.starts(row)] = 0
            # Each position must predict the token after it.
            labels, last = np.where(weights > 0, ids, _IGNORED), ((0, 0), (0, 1))
            labels = np.pad(labels[:, 1:], last, constant_values=_IGNORED)
            weights = np.pad(weights[:, 1:], last)
        else:
            labelled = _TokenRows(rows, _targets)
            weights = labelled.weights()
            labels = np.where(weights > 0, labelled.token_ids(_IGNORED), _IGNORED)
            decoder = self._decoder_inputs(labelled, self._decoder_start)
        columns = np.flatnonzero((labels != _IGNORED).any(axis=0))
        return Batch(
            input_ids=torch.from_numpy(ids),
            position_ids=torch.from_numpy(inputs.positions()),
            labels=torch.from_numpy(labels),
            loss_weights=torch.from_numpy(weights),
            dataset_ids=torch.from_numpy(labelled.dataset_ids()),
            trained_columns=torch.from_numpy(columns if len(columns) else np.zeros(1, np.int64)),
            document_lengths=inputs.lengths,
            step_weight=step_weight,
            num_tokens=inputs.num_tokens + (labelled.num_tokens if decoder else 0),
            decoder=decoder,
        )

    def _decoder_inputs(self, targets: _TokenRows, start_token_id: int) -> DecoderInputs:
        """Move each document's targets one to the right, behind the start token."""
        ids = targets.token_ids(self._pad_token_id)
        moved = np.full_like(ids, self._pad_token_id)
        for index, lengths in enumerate(targets.lengths):
            total = sum(lengths)
            moved[index, 1:total] = ids[index, : max(0, total - 1)]
            moved[index, targets.starts(index)] = start_token_id
        return DecoderInputs(
            torch.from_numpy(moved), torch.from_numpy(targets.positions()), targets.lengths
        )


class _TokenRows:
    """The rows of the encoder or the decoder, whose documents have the ids `token_ids_of(example)`.

    A row has `row_len` tokens, or those of the longest row if that is more, rounded up to
    `multiple`.
    """

    def __init__(
        self,
        rows: list[_Row],
        token_ids_of: Callable[[Example], npt.NDArray[np.int32]],
        row_len: int = 1,
        multiple: int = 1,
    ) -> None:
        self._rows = rows
        self._documents = [[token_ids_of(example) for example in row] for row in rows]
        self.lengths = [[len(document) for document in row] for row in self._documents]
        self.num_tokens = sum(map(sum, self.lengths))
        longest = max([row_len, *map(sum, self.lengths)])
        self.shape = (len(rows), -(-longest // multiple) * multiple)

    def starts(self, row: int) -> _Ints:
        """Return the column at which each document of a row starts."""
        lengths = np.array(self.lengths[row], dtype=np.int64)
        return np.cumsum(lengths) - lengths

    def token_ids(self, pad_token_id: int) -> _Ints:
        return self._padded(self._documents, np.int64(pad_token_id))

    def weights(self) -> npt.NDArray[np.float32]:
        return self._padded([[one.weights for one in row] for row in self._rows], np.float32(0))

    def dataset_ids(self) -> _Ints:
        """Return the data set index of each token, int64 [rows, tokens]."""
        datasets = [
            [np.full(length, one.dataset) for one, length in zip(row, lengths, strict=True)]
            for row, lengths in zip(self._rows, self.lengths, strict=True)
        ]
        return self._padded(datasets, np.int64(0))

    def _padded(self, documents: list[list[npt.NDArray[Any]]], padding: np.generic) -> Any:
        """Return a value for each token, [rows, tokens]."""
        values = np.full(self.shape, padding)
        for row, parts in zip(values, documents, strict=True):
            if parts:
                np.concatenate(parts, out=row[: sum(map(len, parts))], casting="safe")
        return values

    def positions(self) -> _Ints:
        """Return the position of each token in its document, int64 [rows, tokens]."""
        positions = np.zeros(self.shape, dtype=np.int64)
        for index, lengths in enumerate(self.lengths):
            total = sum(lengths)
            positions[index, :total] = np.arange(total) - np.repeat(self.starts(index), lengths)
        return positions


def _targets(example: Example) -> npt.NDArray[np.int32]:
    if example.target_ids is None:
        raise ValueError(f"{example.origin} has no targets for the decoder")
    return example.target_ids
