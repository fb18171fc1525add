"""Supervised fine-tuning: the mean cross-entropy of all trained tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from app.model.head import head_loss
from app.training.objective.forward import head_inputs, rows_of_positions
from app.training.objective.objective import Losses, Objective
from data_modules import Batch


class Sft(Objective):
    """Cross-entropy of each trained token, times its weight."""

    figures: tuple[str, ...] = ()
    is_likelihood = True

    def losses(self, model: Any, batch: Batch, backend: str, reference: Tensor | None) -> Losses:
        head = head_inputs(model, batch, backend)
        total, losses = head_loss(model, head.inputs, head.labels, head.weights)
        rows = rows_of_positions(batch, head)
        return Losses(total, losses, head.weights.flatten(), head.dataset_ids.flatten(), rows)
