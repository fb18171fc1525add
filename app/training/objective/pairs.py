"""Preference objectives: losses of pairs of answers, and of single answers with a verdict (KTO).

The loss of a pair is a function of the log-probabilities of both answers, which returns the rewards
of the answers [pairs, 2] and the losses of the pairs [pairs].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from app.model.adapter import adapter_disabled
from app.model.head import head_log_probs
from app.model.kernels import without_dropout
from app.training.objective import settings
from app.training.objective.objective import (
    Losses,
    Objective,
    document_numbers,
    head_inputs,
    labels_of_units,
    losses_of_units,
    wins,
)
from data_modules import Batch

_FALLS = 3
"""validations in a row with a lower log-probability of the chosen answers that are steady"""
_NOTABLE_FALL = 0.01
"""relative fall over these validations from which it is reported"""
_HIGHEST = -1e-12
"""largest log-probability per token whose odds are finite"""


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


class ReferencedObjective(Objective):
    """Compares log-probabilities of answers with those of the base."""

    source: str
    """where those come from, as `objective.reference`"""

    def reference(self, model: Any, batch: Batch, backend: str) -> Tensor | None:
        """Return the base's log-probabilities of the answers, [answers] or [pairs, 2].

        Without their graph; those of the batch if they are stored. RuntimeError if they should be
        stored, and are not.
        """
        if self.source == "none" or batch.reference is not None:
            return batch.reference
        if self.source == "base":
            return _without_adapter(model, batch, backend)
        # No pass for a batch without answers: ranks that shard the weights have passes in common.
        if any(batch.document_lengths):
            raise RuntimeError("objective.reference=cached: nothing is stored for these answers")
        return torch.zeros(0, dtype=torch.float64, device=batch.input_ids.device)


class PairObjective(ReferencedObjective):
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
        config: settings.ObjectiveConfig,
        compute: Callable[[Any, Pairs], tuple[Tensor, Tensor]],
    ) -> None:
        """`compute`: one of `PAIR_LOSSES`, which takes `config` and pairs."""
        self.config, self.compute, self.source = config, compute, config.reference_source
        if config.compares_with_base:
            self.figures += ("chosen_log_ratio", "rejected_log_ratio")

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


def dpo(config: settings.DpoConfig, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """-log sigmoid(beta (r_chosen - r_rejected)), r: log-probability of an answer minus the base's.

    Equation 7 of arXiv 2305.18290, smoothed as in equation 3 of the cDPO note of its author. With
    `sft_weight`, plus that times the chosen answer's cross-entropy per token (arXiv 2404.19733).
    """
    rewards, smoothing = config.beta * pairs.gains, config.label_smoothing
    margins = rewards[:, 0] - rewards[:, 1]
    losses = -(1 - smoothing) * logsigmoid(margins) - smoothing * logsigmoid(-margins)
    if config.sft_weight:
        losses = losses - config.sft_weight * pairs.means[:, 0]
    return rewards, losses


def ipo(config: settings.IpoConfig, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """(r_chosen - r_rejected - 1 / (2 beta))^2, r: log-probability of an answer minus the base's.

    Equation 17 of arXiv 2310.12036. With `length_normalized`, r is per token, as its authors later
    advised: answers of a hundred tokens otherwise differ by more than the margin from the start.
    """
    gains = pairs.gains_per_token if config.length_normalized else pairs.gains
    losses = (gains[:, 0] - gains[:, 1] - 0.5 / config.beta).square()
    return config.beta * gains, losses


def orpo(config: settings.OrpoConfig, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """-log p_chosen - beta log sigmoid(log odds_chosen - log odds_rejected), odds = p / (1 - p).

    Equations 4 to 7 of arXiv 2403.07691; p: probability per token, a geometric mean.
    """
    means = pairs.means
    bounded = means.clamp_max(_HIGHEST)
    log_odds = bounded - torch.log(-torch.expm1(bounded))
    ratios = log_odds[:, 0] - log_odds[:, 1]
    return config.beta * means, -means[:, 0] - config.beta * logsigmoid(ratios)


def simpo(config: settings.SimpoConfig, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """-log sigmoid(beta (log p_chosen - log p_rejected) - margin), log p: per token.

    Equation 6 of arXiv 2405.14734.
    """
    rewards = config.beta * pairs.means
    return rewards, -logsigmoid(rewards[:, 0] - rewards[:, 1] - config.margin)


PAIR_LOSSES: dict[str, Callable[[Any, Pairs], tuple[Tensor, Tensor]]] = {
    "dpo": dpo,
    "ipo": ipo,
    "orpo": orpo,
    "simpo": simpo,
}


class Kto(ReferencedObjective):
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

    def __init__(self, config: settings.KtoConfig) -> None:
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
            assert reference is not None
            with without_dropout(model):
                log_probs, _ = document_log_probs(model, others, backend)
            sums[0] += (log_probs - reference).sum()
            sums[1] += len(log_probs)
        if sum_over_ranks is not None:
            sums = sum_over_ranks(sums)
        self.kl = (sums[0] / sums[1].clamp_min(1)).clamp_min(0)

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
