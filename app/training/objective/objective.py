"""What a run minimizes: a batch and the model's head in, the sum to differentiate out.

An objective computes the losses of a micro-batch and never sees a step: the mean over a global
step is exact because the sum of each micro-batch is divided by the weight of the whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from app.model.attention.probes import check_isolation, check_padded_rows
from app.model.classifier import hidden_as_logits
from app.model.head import check_head_loss, head_loss
from app.model.quantization import quantize_tokens_independently
from app.training.objective.forward import document_datasets, head_inputs, rows_of_positions
from app.training.objective.sums import DatasetSums, RowSums, losses_by_dataset
from data_modules import Batch


@dataclass(frozen=True, slots=True)
class Losses:
    """The losses of a micro-batch; a unit is what their mean is over: a position, or a pair.

    total        the sum of loss times weight, to differentiate
    losses       float32 [units], detached
    weights      float32 [units], 0 if masked
    dataset_ids  int64 [units]
    rows         returns the row of each unit, int64 [units], and the number of rows of the batch
    """

    total: Tensor
    losses: Tensor
    weights: Tensor
    dataset_ids: Tensor
    rows: Callable[[], tuple[Tensor, int]]
    tokens: Tensor | None = None
    """trained tokens of each unit [units], None for one"""
    figures: Sequence[Tensor] = ()
    """what else is measured of each unit [units], detached"""
    outputs: Tensor | None = None
    """what a head for classes says of each unit [units, classes], detached"""


def losses_of_units(
    losses: Tensor,
    weights: Tensor,
    batch: Batch,
    figures: Sequence[Tensor],
    *,
    tokens: Tensor | None = None,
    outputs: Tensor | None = None,
) -> Losses:
    """Return the losses of documents, or of pairs of two documents each; arguments as `Losses`."""
    datasets = document_datasets(batch)
    return Losses(
        (losses * weights).sum(),
        losses.detach(),
        weights,
        datasets[:: max(1, len(datasets) // max(1, len(losses)))],
        lambda: (torch.arange(len(losses), device=losses.device), len(losses)),
        tokens,
        figures,
        outputs,
    )


def wins(margins: Tensor) -> Tensor:
    """Return the accuracy of each unit: 1 if its margin is positive, a half if it is exactly 0."""
    return torch.heaviside(margins, torch.full_like(margins, 0.5))


def labels_of_units(batch: Batch, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return labels and weights [units], empty and `like` another for a micro-batch without any."""
    nothing = like.new_zeros(0)
    labels, weights = batch.unit_labels, batch.unit_weights
    return (nothing if labels is None else labels, nothing if weights is None else weights)


class Objective(Protocol):
    """What a run minimizes."""

    figures: tuple[str, ...]
    """names of the further figures of its metrics"""
    classes: Sequence[str] = ()
    """names of the classes that it tells apart"""
    is_multi_label: bool = False
    """whether a text may have several of them, or none: bits of its label"""
    is_likelihood: bool
    """whether its loss is a mean of -log p, of which a perplexity can be told"""

    def begin(
        self,
        model: Any,
        batches: Iterable[Batch],
        backend: str,
        device: torch.device,
        sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Measure what the losses of a step or a validation needs of its batches: here nothing."""
        return

    def reference(self, model: Any, batch: Batch, backend: str) -> Tensor | None:
        """Return what the model without its adapter says of the batch: here nothing."""
        return None

    def losses(self, model: Any, batch: Batch, backend: str, reference: Tensor | None) -> Losses:
        """Return the losses of a micro-batch, whose attention is computed by `backend`."""


class Sft(Objective):
    """Supervised fine-tuning: cross-entropy of each trained token, times its weight."""

    figures: tuple[str, ...] = ()
    is_likelihood = True

    def losses(self, model: Any, batch: Batch, backend: str, reference: Tensor | None) -> Losses:
        head = head_inputs(model, batch, backend)
        total, losses = head_loss(model, head.inputs, head.labels, head.weights)
        rows = rows_of_positions(batch, head)
        return Losses(total, losses, head.weights.flatten(), head.dataset_ids.flatten(), rows)


def batch_loss(
    objective: Objective,
    model: Any,
    batch: Batch,
    backend: str,
    sums: DatasetSums,
    rows: RowSums | None = None,
    reference: Tensor | None = None,
) -> Tensor:
    """Return the sum of loss times weight over a micro-batch.

    Adds it to `sums` by data set, and to `rows` by row. `reference`: that of the objective, None to
    compute it here.
    """
    if reference is None:
        reference = objective.reference(model, batch, backend)
    found = objective.losses(model, batch, backend, reference)
    sums.add(found.losses, found.weights, found.dataset_ids, found.tokens, found.figures)
    if rows is not None:
        rows.add(found.losses, found.weights, *found.rows(), found.outputs)
    return found.total


@torch.no_grad()
def validate(
    objective: Objective,
    model: Any,
    batches: Iterable[Batch],
    backend: str,
    dataset_names: list[str],
    device: torch.device | None = None,
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
    *,
    is_packed: bool = False,
    rows: RowSums | None = None,
) -> dict[str, float]:
    """Return exact validation losses over all batches, on `device` or the model's own.

    With `sum_over_ranks` each rank has a share of the batches, and all ranks return equal metrics.
    `is_packed`: rows may hold several documents, which the model must isolate from each other. The
    sums of this rank's rows of data are added to `rows`. Some objectives iterate over `batches`
    twice.
    """
    sums = DatasetSums(len(dataset_names))
    device = device or model.device
    if not model.config.is_encoder_decoder:
        with quantize_tokens_independently(model), hidden_as_logits(model):
            (check_isolation if is_packed else check_padded_rows)(model, backend, device)
    check_head_loss(model, backend, device)
    model.eval()
    objective.begin(model, batches, backend, device, sum_over_ranks)
    for batch in batches:
        batch_loss(objective, model, batch.to(device, non_blocking=True), backend, sums, rows)
    taken = sums.take()
    total = taken if sum_over_ranks is None else sum_over_ranks(taken)
    return losses_by_dataset(total.cpu(), dataset_names, "val", objective.figures)
