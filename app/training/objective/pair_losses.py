"""The losses of preference pairs, each a function of both answers.

Each returns the rewards of the answers [pairs, 2], and the losses of the pairs [pairs].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from app.training.objective.pairs import Pairs
from app.training.objective.settings import DpoConfig, IpoConfig, OrpoConfig, SimpoConfig

_HIGHEST = -1e-12
"""largest log-probability per token whose odds are finite"""


def dpo(config: DpoConfig, pairs: Pairs) -> tuple[Tensor, Tensor]:
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


def ipo(config: IpoConfig, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """(r_chosen - r_rejected - 1 / (2 beta))^2, r: log-probability of an answer minus the base's.

    Equation 17 of arXiv 2310.12036. With `length_normalized`, r is per token, as its authors later
    advised: answers of a hundred tokens otherwise differ by more than the margin from the start.
    """
    gains = pairs.gains_per_token if config.length_normalized else pairs.gains
    losses = (gains[:, 0] - gains[:, 1] - 0.5 / config.beta).square()
    return config.beta * gains, losses


def orpo(config: OrpoConfig, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """-log p_chosen - beta log sigmoid(log odds_chosen - log odds_rejected), odds = p / (1 - p).

    Equations 4 to 7 of arXiv 2403.07691; p: probability per token, a geometric mean.
    """
    means = pairs.means
    bounded = means.clamp_max(_HIGHEST)
    log_odds = bounded - torch.log(-torch.expm1(bounded))
    ratios = log_odds[:, 0] - log_odds[:, 1]
    return config.beta * means, -means[:, 0] - config.beta * logsigmoid(ratios)


def simpo(config: SimpoConfig, pairs: Pairs) -> tuple[Tensor, Tensor]:
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
