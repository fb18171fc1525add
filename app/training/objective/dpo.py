"""Direct preference optimization: the mean over pairs of a loss of two answers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from app.model.adapter import adapter_disabled
from app.model.eval_mode import eval_mode
from app.model.head import head_log_probs
from app.training.objective.forward import document_numbers, head_inputs
from app.training.objective.objective import Losses
from app.training.objective.settings import DpoConfig
from data_modules import Batch


class Dpo:
    """-log sigmoid(beta (r_chosen - r_rejected)), r: log-probability of an answer minus the base's.

    Equation 7 of arXiv 2305.18290, smoothed as in equation 3 of the cDPO note of its author.
    """

    figures: tuple[str, ...] = (
        "accuracy",
        "margin",
        "chosen_reward",
        "rejected_reward",
        "chosen_log_prob",
        "rejected_log_prob",
    )
    is_likelihood = False

    def __init__(self, config: DpoConfig) -> None:
        self.beta, self.label_smoothing = config.beta, config.label_smoothing

    def reference(self, model: Any, batch: Batch, backend: str) -> Tensor:
        """Return the base's log-probabilities of the answers [pairs, 2], without their graph."""
        with eval_mode(model), adapter_disabled(model):
            return answer_log_probs(model, batch, backend)

    def losses(self, model: Any, batch: Batch, backend: str, reference: Tensor | None) -> Losses:
        """Return the losses of the pairs of a micro-batch; `reference` as from the method."""
        assert reference is not None
        log_probs = answer_log_probs(model, batch, backend)
        rewards = self.beta * (log_probs - reference)
        chosen, rejected = rewards.unbind(1)
        margins = chosen - rejected
        smoothing = self.label_smoothing
        losses = -(1 - smoothing) * logsigmoid(margins) - smoothing * logsigmoid(-margins)
        weights = losses.new_zeros(0) if batch.pair_weights is None else batch.pair_weights
        dataset_ids, tokens = _of_pairs(batch)
        with torch.no_grad():
            figures = [(margins > 0).to(margins), margins, chosen, rejected, *log_probs.unbind(1)]
        return Losses(
            (losses * weights).sum(),
            losses.detach(),
            weights,
            dataset_ids,
            lambda: (torch.arange(len(losses), device=losses.device), len(losses)),
            tokens,
            [figure.detach() for figure in figures],
        )


def answer_log_probs(model: Any, batch: Batch, backend: str) -> Tensor:
    """Return the log-probability of each answer, chosen and rejected, fp64 [pairs, 2]."""
    head = head_inputs(model, batch, backend)
    log_probs = head_log_probs(model, head.inputs, head.labels)
    documents, count = document_numbers(batch)
    # fp64: the small difference of two sums over hundreds of tokens is what is learned from.
    sums = log_probs.new_zeros(count + 1, dtype=torch.float64)
    sums = sums.index_add(0, documents[:, head.columns].flatten(), log_probs.flatten().double())
    # Without a pair the padding is left, which has no labels: a sum that is 0, but of the graph.
    return (sums[:-1] + 0 * sums[-1]).view(-1, 2)


def _of_pairs(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the data set and the trained tokens of each pair, int64 [pairs]."""
    documents, count = document_numbers(batch)
    numbers = documents.flatten()
    datasets = numbers.new_zeros(count + 1).scatter_(0, numbers, batch.dataset_ids.flatten())
    is_trained = (batch.labels >= 0).flatten().long()
    tokens = numbers.new_zeros(count + 1).index_add_(0, numbers, is_trained)
    return datasets[:-1:2], tokens[:-1].view(-1, 2).sum(1)
