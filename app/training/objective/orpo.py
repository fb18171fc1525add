"""Odds-ratio preference optimization: SFT on the chosen answer, which also gets the higher odds."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from app.training.objective.pairs import Pairs
from app.training.objective.settings import OrpoConfig

HIGHEST = -1e-12
"""largest log-probability per token whose odds are finite"""


class Orpo:
    """-log p_chosen - beta log sigmoid(log odds_chosen - log odds_rejected), odds = p / (1 - p).

    Equations 4 to 7 of arXiv 2403.07691; p: probability per token, a geometric mean.
    """

    first_loss: float | None = None

    def __init__(self, config: OrpoConfig) -> None:
        self.beta = config.beta

    def losses(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Return the rewards beta log p [pairs, 2], and the losses [pairs]."""
        means = pairs.means
        bounded = means.clamp_max(HIGHEST)
        log_odds = bounded - torch.log(-torch.expm1(bounded))
        ratios = log_odds[:, 0] - log_odds[:, 1]
        return self.beta * means, -means[:, 0] - self.beta * logsigmoid(ratios)
