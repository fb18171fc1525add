"""What the objectives of preference pairs share: the log-probabilities of both answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from app.model.adapter import adapter_disabled
from app.model.head import head_log_probs
from app.model.kernels import without_dropout
from app.training.objective.forward import document_numbers, head_inputs
from app.training.objective.objective import (
    Losses,
    Objective,
    labels_of_units,
    losses_of_units,
    wins,
)
from app.training.objective.settings import ObjectiveConfig
from data_modules import Batch

_FALLS = 3
"""validations in a row with a lower log-probability of the chosen answers that are steady"""
_NOTABLE_FALL = 0.01
"""relative fall over these validations from which it is reported"""


@dataclass(frozen=True, slots=True)
class Pairs:
    """The answers of a micro-batch's pairs, chosen and rejected.

    log_probs   fp64 [pairs, 2], of all trained tokens of an answer
    num_tokens  fp64 [pairs, 2], trained tokens
    reference   fp64 [pairs, 2], the base's log-probabilities; None: they count as 0
    """

    log_probs: Tensor
    num_tokens: Tensor
    reference: Tensor | None = None

    @property
    def means(self) -> Tensor:
        return self.log_probs / self.num_tokens.clamp_min(1)

    @property
    def gains(self) -> Tensor:
        """Log-probabilities minus those of the base."""
        return self.log_probs if self.reference is None else self.log_probs - self.reference

    @property
    def gains_per_token(self) -> Tensor:
        """Mean over an answer's tokens of their log-probability minus that of the base."""
        return self.gains / self.num_tokens.clamp_min(1)


class PairObjective(Objective):
    """The mean over pairs of a loss of both answers.

    Where they are compared with the base, it also measures `chosen_log_ratio` and
    `rejected_log_ratio`: log-probabilities per token minus those of the base. They are the plain
    (k1) estimate of the KL divergence from the base only if the model itself wrote the answers;
    of those that the base wrote, the negative estimates the reverse divergence.
    """

    figures: tuple[str, ...] = (
        "accuracy",
        "margin",
        "chosen_reward",
        "rejected_reward",
        "chosen_log_prob",
        "rejected_log_prob",
        "chosen_tokens",
        "rejected_tokens",
    )
    is_likelihood = False

    def __init__(
        self,
        config: ObjectiveConfig,
        compute: Callable[[Any, Pairs], tuple[Tensor, Tensor]],
    ) -> None:
        """`compute`: a function of `pair_losses.py`, which takes `config` and pairs."""
        self.config, self.compute = config, compute
        if config.compares_with_base:
            self.figures += ("chosen_log_ratio", "rejected_log_ratio")

    def reference(self, model: Any, batch: Batch, backend: str) -> Tensor | None:
        """Return the base's log-probabilities of the answers [pairs, 2], without their graph.

        They are those of the batch if they are stored.
        """
        return reference_log_probs(self.config.reference_source, model, batch, backend)

    def losses(self, model: Any, batch: Batch, backend: str, reference: Tensor | None) -> Losses:
        log_probs, num_tokens = (
            each.view(-1, 2) for each in document_log_probs(model, batch, backend)
        )
        if reference is not None:
            reference = reference.view_as(log_probs)
        pairs = Pairs(log_probs, num_tokens, reference)
        rewards, losses = self.compute(self.config, pairs)
        _, weights = labels_of_units(batch, losses)
        chosen, rejected = rewards.detach().unbind(1)
        margins = chosen - rejected
        figures = [wins(margins), margins, chosen, rejected]
        figures += [*pairs.log_probs.detach().unbind(1), *pairs.num_tokens.unbind(1)]
        if self.config.compares_with_base:
            figures += pairs.gains_per_token.detach().unbind(1)
        tokens = num_tokens.sum(1).long()
        return losses_of_units(losses, weights, batch, figures, tokens=tokens)


def reference_log_probs(source: str, model: Any, batch: Batch, backend: str) -> Tensor | None:
    """Return the base's log-probabilities of the answers, without their graph, fp64 [answers].

    Those of the batch, [answers] or [pairs, 2], if they are stored. `source`: as
    `objective.reference`; None for none. RuntimeError if they should be stored, and are not.
    """
    if source == "none" or batch.reference is not None:
        return batch.reference
    if source == "base":
        return _without_adapter(model, batch, backend)
    # No pass for a batch without answers: ranks that shard the weights have passes in common.
    if any(batch.document_lengths):
        raise RuntimeError("objective.reference=cached: nothing is stored for these answers")
    return torch.zeros(0, dtype=torch.float64, device=batch.input_ids.device)


def base_log_probs(model: Any, batch: Batch, backend: str) -> Tensor:
    """Compute log-probabilities of both answers [pairs, 2] without the adapter of the model.

    Of rows with a verdict, those of their answers and of the other rows' answers to their prompts.
    """
    if batch.others is None:
        return _without_adapter(model, batch, backend).view(-1, 2)
    both = [_without_adapter(model, each, backend) for each in (batch, batch.others)]
    return torch.stack(both, dim=1)


def _without_adapter(model: Any, batch: Batch, backend: str) -> Tensor:
    with without_dropout(model), adapter_disabled(model):
        return document_log_probs(model, batch, backend)[0]


def document_log_probs(model: Any, batch: Batch, backend: str) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each document's labels, and their number, fp64 [documents]."""
    head = head_inputs(model, batch, backend)
    log_probs = head_log_probs(model, head.inputs, head.labels)
    documents, count = document_numbers(batch)
    # fp64: the small difference of two sums over hundreds of tokens is what is learned from.
    sums = log_probs.new_zeros(count + 1, dtype=torch.float64)
    sums = sums.index_add(0, documents[:, head.columns].flatten(), log_probs.flatten().double())
    is_trained = (batch.labels >= 0).flatten().double()
    num_tokens = is_trained.new_zeros(count + 1).index_add_(0, documents.flatten(), is_trained)
    # Without a pair the padding is left, which has no labels: a sum that is 0, but of the graph.
    return sums[:-1] + 0 * sums[-1], num_tokens[:-1]


def find_warning(validations: Sequence[Mapping[str, float]]) -> str | None:
    """Return what the latest of a run's validations is the first to show, None if all is well.

    `validations`: metrics of each, the first from before the first step.
    """
    chosen = [each["val/chosen_log_prob"] for each in validations if "val/chosen_log_prob" in each]
    if len(chosen) == 2 and validations[-1].get("val/accuracy") == 1.0:
        return (
            "all validation pairs are already told apart: see what gives the chosen answers away, "
            "such as their length (python -m app.preview), or whether the pairs are also trained on"
        )
    falls = [later < earlier for earlier, later in pairwise(chosen)]
    first, last = chosen[-_FALLS - 1 :][:1], chosen[-1:]
    is_new = falls[-_FALLS:] == [True] * _FALLS and falls[-_FALLS - 1 : -_FALLS] != [True]
    if is_new and first[0] - last[0] > _NOTABLE_FALL * abs(first[0]):
        return (
            f"chosen answers have become less likely in {_FALLS} validations in a row (their "
            f"log-probability went from {first[0]:.4g} to {last[0]:.4g}): try a lower "
            "optimizer.lr, a higher objective.beta, or objective.sft_weight with objective=dpo"
        )
    return None
