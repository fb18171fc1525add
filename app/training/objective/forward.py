"""A batch as arguments of a model's forward pass, for logits at its trained positions only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from app.model.attention.documents import to_device
from app.model.attention.inputs import attention_inputs, pair_inputs
from data_modules import Batch, DecoderInputs


@dataclass(frozen=True, slots=True)
class HeadInputs:
    """What the head computes from: the model's arguments, and the positions that are trained.

    inputs       arguments of the forward pass, for logits [rows, columns, vocabulary]
    labels       int64 [rows, columns], -100 if masked
    weights      float32 [rows, columns]
    dataset_ids  int64 [rows, columns]
    columns      the trained columns of the batch
    """

    inputs: dict[str, Any]
    labels: Tensor
    weights: Tensor
    dataset_ids: Tensor
    columns: Tensor | slice


def head_inputs(model: Any, batch: Batch, backend: str) -> HeadInputs:
    """Return the arguments of a forward pass, and the labels and weights of its logits."""
    columns: Tensor | slice = slice(None)  # a decoder trains on nearly all positions
    if batch.decoder is None:
        # The head runs only on trained positions: prompts cost no logits.
        columns = batch.trained_columns
        inputs = causal_inputs(model, batch, backend)
    else:
        inputs = _decoder_inputs(model, batch, batch.decoder, backend)
    return HeadInputs(
        inputs,
        batch.labels[:, columns],
        batch.loss_weights[:, columns],
        batch.dataset_ids[:, columns],
        columns,
    )


def document_numbers(batch: Batch) -> tuple[Tensor, int]:
    """Return the document of each label [rows, tokens], and the number of documents of the batch.

    Documents are counted over the whole batch; padding has the index after the last document.
    """
    rows = (batch if batch.decoder is None else batch.decoder).document_lengths
    last = sum(map(len, rows))
    num_rows, columns = batch.labels.shape
    if batch.sequence is not None:
        columns = batch.sequence.chunks[-1].stop
    numbers = torch.full((num_rows, columns), last)
    first = 0
    for row, lengths in enumerate(rows):
        row_numbers = torch.arange(first, first + len(lengths))
        repeats = torch.tensor(lengths).long()
        whole = row_numbers.repeat_interleave(repeats, output_size=sum(lengths))
        numbers[row, : len(whole)] = whole[:columns]
        first += len(lengths)
    if batch.sequence is not None:
        numbers = batch.sequence.take(numbers)
    return to_device(numbers, batch.labels.device), last


def rows_of_positions(batch: Batch, head: HeadInputs) -> Callable[[], tuple[Tensor, int]]:
    """Return `Losses.rows` of losses of the positions of the head."""

    def rows() -> tuple[Tensor, int]:
        numbers, num_rows = document_numbers(batch)
        return numbers[:, head.columns].flatten(), num_rows

    return rows


def document_datasets(batch: Batch) -> Tensor:
    """Return the data set of each document, int64 [documents]."""
    documents, count = document_numbers(batch)
    numbers = documents.flatten()
    datasets = numbers.new_zeros(count + 1).scatter_(0, numbers, batch.dataset_ids.flatten())
    return datasets[:-1]


def causal_inputs(model: Any, batch: Batch, backend: str) -> dict[str, Any]:
    """Return a causal model's inputs, for logits [rows, trained columns, vocabulary]."""
    inputs = {
        "input_ids": batch.input_ids,
        "use_cache": False,
        "logits_to_keep": batch.trained_columns,
    }
    # Single documents get their positions from the model: not every model starts at 0 (RoBERTa).
    is_packed = any(len(lengths) > 1 for lengths in batch.document_lengths)
    if is_packed or batch.sequence is not None:
        inputs["position_ids"] = batch.position_ids
    return inputs | attention_inputs(
        model, backend, batch.document_lengths, batch.input_ids, batch.sequence
    )


def _decoder_inputs(
    model: Any, batch: Batch, decoder: DecoderInputs, backend: str
) -> dict[str, Any]:
    """Return an encoder-decoder model's inputs, for logits [rows, targets, vocabulary]."""
    return {
        "input_ids": batch.input_ids,
        "decoder_input_ids": decoder.input_ids,
        "use_cache": False,
    } | pair_inputs(
        model,
        backend,
        batch.document_lengths,
        decoder.document_lengths,
        batch.input_ids,
        decoder.input_ids,
    )
