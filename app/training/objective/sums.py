"""Exact sums of losses over many micro-batches, by data set and by row, on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class DatasetSums:
    """Running sums by data set, on the device: weighted losses, weights, tokens, figures."""

    def __init__(self, num_datasets: int) -> None:
        self.num_datasets = num_datasets
        self.sums: Tensor | None = None

    def add(
        self,
        losses: Tensor,
        weights: Tensor,
        dataset_ids: Tensor,
        tokens: Tensor | None = None,
        figures: Sequence[Tensor] = (),
    ) -> None:
        """Add units; all arguments are [units], with weight 0 if the loss is masked.

        `tokens`: trained tokens of each, None for one; `figures`: what is averaged as the loss is,
        NaN for the units that a figure says nothing of.
        """
        if tokens is None:
            tokens = weights > 0
        columns = [losses * weights, weights, tokens.to(losses.dtype)]
        for figure in figures:
            counts = torch.where(figure.isnan(), 0, weights)
            columns += [figure.nan_to_num() * counts, counts]
        # fp64: the sum of millions of validation losses must not depend on their order.
        parts = torch.stack(columns).double()
        if self.sums is None:
            self.sums = parts.new_zeros(len(parts), self.num_datasets)
        self.sums.index_add_(1, dataset_ids, parts)

    def add_nothing(self, num_sums: int, device: torch.device) -> None:
        """Begin with zeros, on a rank whose rows are counted by another one."""
        self.sums = torch.zeros(num_sums, self.num_datasets, dtype=torch.double, device=device)

    def scale_losses(self, datasets: Tensor, value: float) -> None:
        """Multiply the sums of losses of `datasets` [k] by `value`, which may be NaN."""
        assert self.sums is not None
        self.sums[0, datasets] *= value

    def take(self) -> Tensor:
        """Return the sums [3 + 2 figures, data sets] and reset them; RuntimeError without any."""
        if self.sums is None:
            raise RuntimeError("no batch was added since the last step")
        taken, self.sums = self.sums, None
        return taken


class RowSums:
    """Weighted losses and weights of each validation row, on the device.

    `keeps_outputs`: also what a head for classes says of each row.
    """

    def __init__(self, *, keeps_outputs: bool = False) -> None:
        self._parts: list[Tensor] = []
        self._keeps_outputs = keeps_outputs

    def add(
        self,
        losses: Tensor,
        weights: Tensor,
        rows: Tensor,
        num_rows: int,
        outputs: Tensor | None = None,
    ) -> None:
        """Add a batch of `num_rows` rows; `rows` [positions] is the row of each loss.

        Losses of `num_rows` are those of padding. `outputs` [positions, classes], one a row.
        """
        kept = outputs.unbind(1) if self._keeps_outputs and outputs is not None else ()
        parts = torch.stack([weights * losses, weights, *kept]).double()
        sums = parts.new_zeros(len(parts), num_rows + 1)
        self._parts.append(sums.index_add_(1, rows, parts)[:, :-1])

    def take(self, places: Sequence[int], num_rows: int) -> Tensor:
        """Return the sums [2 + kept outputs, num_rows] and reset them.

        `places`: index of each added row, in order; rows never added have sums of 0.
        """
        added, self._parts = torch.cat(self._parts, dim=1), []
        sums = added.new_zeros(len(added), num_rows)
        sums[:, torch.tensor(places, dtype=torch.long, device=added.device)] = added
        return sums


def losses_by_dataset(
    sums: Tensor, names: list[str], prefix: str, figures: Sequence[str] = ()
) -> dict[str, float]:
    """Turn sums [3 + 2 figures, data sets] on the host into `PREFIX/loss` and metrics of data sets.

    Each data set has a loss, tokens, a share and the means of its figures; without trained tokens
    it has no loss and no figures.
    """
    losses, weights, tokens, *summed = sums.tolist()
    metrics = {f"{prefix}/loss": sum(losses) / sum(weights)} if sum(weights) else {}
    for name, loss, weight, count in zip(names, losses, weights, tokens, strict=True):
        if weight:
            metrics[f"{prefix}/loss/{name}"] = loss / weight
        metrics[f"{prefix}/tokens/{name}"] = count
        metrics[f"{prefix}/share/{name}"] = count / max(1.0, sum(tokens))
    for figure, values, counts in zip(figures, summed[::2], summed[1::2], strict=True):
        if sum(counts):
            metrics[f"{prefix}/{figure}"] = sum(values) / sum(counts)
        for name, value, weight in zip(names, values, counts, strict=True):
            if weight:
                metrics[f"{prefix}/{figure}/{name}"] = value / weight
    return metrics
