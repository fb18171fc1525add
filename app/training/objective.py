"""The loss of a batch, and its exact sums by data set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from app.model.attention import (
    attention_inputs,
    check_isolation,
    check_padded_rows,
    pair_inputs,
)
from app.model.head import check_head_loss, head_loss
from app.model.quantization import quantize_tokens_independently
from data_modules import Batch, DecoderInputs


class DatasetSums:
    """Running sums by data set, on the device: weighted losses, weights, trained tokens."""

    def __init__(self, num_datasets: int) -> None:
        self.num_datasets = num_datasets
        self.sums: Tensor | None = None

    def add(self, losses: Tensor, weights: Tensor, dataset_ids: Tensor) -> None:
        """Add positions; all arguments are [positions], with weight 0 if the loss is masked."""
        # fp64: the sum of millions of validation losses must not depend on their order.
        parts = torch.stack([losses * weights, weights, (weights > 0).to(losses.dtype)]).double()
        if self.sums is None:
            self.sums = parts.new_zeros(3, self.num_datasets)
        self.sums.index_add_(1, dataset_ids, parts)

    def scale_losses(self, datasets: Tensor, value: float) -> None:
        """Multiply the sums of losses of `datasets` [k] by `value`, which may be NaN."""
        assert self.sums is not None
        self.sums[0, datasets] *= value

    def take(self) -> Tensor:
        """Return the sums [3, data sets] and reset them; RuntimeError if nothing was added."""
        if self.sums is None:
            raise RuntimeError("no batch was added since the last step")
        taken, self.sums = self.sums, None
        return taken


class DocumentSums:
    """Weighted losses and weights of each validation document, on the device."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []

    def add(self, losses: Tensor, batch: Batch, columns: Tensor | slice) -> None:
        """Add the documents of a batch; `losses` [positions] are those of its trained `columns`."""
        weights = batch.loss_weights[:, columns]
        documents = _document_numbers(batch).to(weights.device)[:, columns].flatten()
        parts = torch.stack([losses * weights.flatten(), weights.flatten()]).double()
        sums = parts.new_zeros(2, sum(map(len, _labelled_lengths(batch))) + 1)
        self._parts.append(sums.index_add_(1, documents, parts)[:, :-1])

    def take(self, places: Sequence[int], num_documents: int) -> Tensor:
        """Return the sums [2, num_documents] and reset them.

        `places`: index of each added document, in order; documents never added have sums of 0.
        """
        added, self._parts = torch.cat(self._parts, dim=1), []
        sums = added.new_zeros(2, num_documents)
        sums[:, torch.tensor(places, dtype=torch.long, device=added.device)] = added
        return sums


def _labelled_lengths(batch: Batch) -> list[list[int]]:
    return (batch if batch.decoder is None else batch.decoder).document_lengths


def _document_numbers(batch: Batch) -> Tensor:
    """Return the document index of each position [rows, tokens], counted over the whole batch.

    Padding has the index after the last document.
    """
    rows = _labelled_lengths(batch)
    last = sum(map(len, rows))
    numbers = torch.full(batch.labels.shape, last)
    first = 0
    for row, lengths in enumerate(rows):
        row_numbers = torch.arange(first, first + len(lengths))
        numbers[row, : sum(lengths)] = row_numbers.repeat_interleave(torch.tensor(lengths).long())
        first += len(lengths)
    return numbers


def batch_loss(
    model: Any,
    batch: Batch,
    backend: str,
    sums: DatasetSums,
    documents: DocumentSums | None = None,
) -> Tensor:
    """Return the sum of loss times weight over a micro-batch.

    Adds it to `sums` by data set, and to `documents` by document.
    """
    columns: Tensor | slice = slice(None)  # a decoder trains on nearly all positions
    if batch.decoder is None:
        # The head runs only on trained positions: prompts cost no logits.
        columns = batch.trained_columns
        inputs = _causal_inputs(model, batch, backend)
    else:
        inputs = _decoder_inputs(model, batch, batch.decoder, backend)
    weights = batch.loss_weights[:, columns]
    total, losses = head_loss(model, inputs, batch.labels[:, columns], weights)
    sums.add(losses, weights.flatten(), batch.dataset_ids[:, columns].flatten())
    if documents is not None:
        documents.add(losses, batch, columns)
    return total


def _causal_inputs(model: Any, batch: Batch, backend: str) -> dict[str, Any]:
    """Return a causal model's inputs, for logits [rows, trained columns, vocabulary]."""
    inputs = {
        "input_ids": batch.input_ids,
        "use_cache": False,
        "logits_to_keep": batch.trained_columns,
    }
    # Single documents get their positions from the model: not every model starts at 0 (RoBERTa).
    if any(len(lengths) > 1 for lengths in batch.document_lengths):
        inputs["position_ids"] = batch.position_ids
    return inputs | attention_inputs(model, backend, batch.document_lengths, batch.input_ids)


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


@torch.no_grad()
def validate(
    model: Any,
    batches: Iterable[Batch],
    backend: str,
    dataset_names: list[str],
    device: torch.device | None = None,
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
    *,
    is_packed: bool = False,
    documents: DocumentSums | None = None,
) -> dict[str, float]:
    """Return exact validation losses over all batches, on `device` or the model's own.

    With `sum_over_ranks` each rank has a share of the batches, and all ranks return equal metrics.
    `is_packed`: rows may hold several documents, which the model must isolate from each other. The
    sums of this rank's documents are added to `documents`.
    """
    sums = DatasetSums(len(dataset_names))
    device = device or model.device
    if not model.config.is_encoder_decoder:
        with quantize_tokens_independently(model):
            (check_isolation if is_packed else check_padded_rows)(model, backend, device)
    check_head_loss(model, backend, device)
    model.eval()
    for batch in batches:
        batch_loss(model, batch.to(device, non_blocking=True), backend, sums, documents)
    taken = sums.take()
    total = taken if sum_over_ranks is None else sum_over_ranks(taken)
    return losses_by_dataset(total.cpu(), dataset_names, "val")


def losses_by_dataset(sums: Tensor, names: list[str], prefix: str) -> dict[str, float]:
    """Turn sums [3, data sets] on the host into `PREFIX/loss` and the metrics of data sets.

    Each data set has a loss, tokens and a share; without trained tokens it has no loss.
    """
    losses, weights, tokens = sums.tolist()
    metrics = {f"{prefix}/loss": sum(losses) / sum(weights)} if sum(weights) else {}
    for name, loss, weight, count in zip(names, losses, weights, tokens, strict=True):
        if weight:
            metrics[f"{prefix}/loss/{name}"] = loss / weight
        metrics[f"{prefix}/tokens/{name}"] = count
        metrics[f"{prefix}/share/{name}"] = count / max(1.0, sum(tokens))
    return metrics
