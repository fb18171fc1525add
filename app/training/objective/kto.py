"""Kahneman-Tversky optimization: answers that are wanted above the drift from the base, or not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from app.model.kernels import without_dropout
from app.training.objective.objective import (
    Losses,
    Objective,
    labels_of_units,
    losses_of_units,
    wins,
)
from app.training.objective.pairs import document_log_probs, reference_log_probs
from app.training.objective.settings import KtoConfig
from data_modules import Batch


class Kto(Objective):
    """1 - sigmoid(beta (r - kl)) if the answer is wanted, else 1 - sigmoid(beta (kl - r)).

    Equation 8 of arXiv 2402.01306; r: log-probability of an answer minus the base's; kl: the mean
    of r over prompts with answers of other rows, at least 0, over all of a step or a validation.
    It has no gradient, and is measured without one before the losses. `log_ratio`: as for pairs.
    """

    figures: tuple[str, ...] = (
        "accuracy",
        "kl",
        "desirable_reward",
        "undesirable_reward",
        "desirable_log_prob",
        "undesirable_log_prob",
        "desirable_tokens",
        "undesirable_tokens",
        "desirable_log_ratio",
        "undesirable_log_ratio",
    )
    is_likelihood = False

    def __init__(self, config: KtoConfig) -> None:
        self.beta, self.source = config.beta, config.reference
        self.weights = config.undesirable_weight, config.desirable_weight
        self.kl: Tensor | None = None

    def begin(
        self,
        model: Any,
        batches: Iterable[Batch],
        backend: str,
        device: torch.device,
        sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Measure how far the model has drifted from the base, on answers of other rows."""
        sums = torch.zeros(2, dtype=torch.float64, device=device)
        for batch in batches:
            others = batch.others
            assert others is not None
            others = others.to(device)
            reference = self.reference(model, others, backend)
            with without_dropout(model):
                log_probs, _ = document_log_probs(model, others, backend)
            sums[0] += (log_probs - reference).sum()
            sums[1] += len(log_probs)
        if sum_over_ranks is not None:
            sums = sum_over_ranks(sums)
        self.kl = (sums[0] / sums[1].clamp_min(1)).clamp_min(0)

    def reference(self, model: Any, batch: Batch, backend: str) -> Tensor:
        """Return the base's log-probabilities of the answers [answers], without their graph.

        They are those of the batch if they are stored.
        """
        return reference_log_probs(self.source, model, batch, backend)

    def losses(self, model: Any, batch: Batch, backend: str, reference: Tensor | None) -> Losses:
        log_probs, num_tokens = document_log_probs(model, batch, backend)
        assert reference is not None
        labels, weights = labels_of_units(batch, log_probs)
        gains, is_wanted = log_probs - reference, labels > 0
        kl = gains.new_zeros(()) if self.kl is None else self.kl
        advantage = torch.where(is_wanted, gains - kl, kl - gains)
        scale = torch.where(is_wanted, self.weights[1], self.weights[0])
        losses = scale * (1 - torch.sigmoid(self.beta * advantage))
        detached = [self.beta * gains.detach(), log_probs.detach(), num_tokens]
        detached.append(gains.detach() / num_tokens.clamp_min(1))
        of_kind = [
            torch.where(is_wanted == wanted, values, torch.nan)
            for values in detached
            for wanted in (True, False)
        ]
        figures = [wins(advantage.detach()), self.beta * kl.expand_as(gains), *of_kind]
        return losses_of_units(losses, weights, batch, figures, tokens=num_tokens.long())
