"""Direct preference optimization: chosen answers above rejected ones, relative to the base."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn.functional import logsigmoid

from app.training.objective.pairs import Pairs
from app.training.objective.settings import DpoConfig


class Dpo:
    """-log sigmoid(beta (r_chosen - r_rejected)), r: log-probability of an answer minus the base's.

    Equation 7 of arXiv 2305.18290, smoothed as in equation 3 of the cDPO note of its author. With
    `sft_weight`, plus that times the chosen answer's cross-entropy per token (arXiv 2404.19733).
    """

    def __init__(self, config: DpoConfig) -> None:
        self.beta, self.label_smoothing = config.beta, config.label_smoothing
        self.sft_weight = config.sft_weight
        is_known = config.compares_with_base and not config.sft_weight
        self.first_loss = math.log(2) if is_known else None

    def losses(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Return the rewards beta r [pairs, 2], and the losses [pairs]."""
        rewards, smoothing = self.beta * pairs.gains, self.label_smoothing
        margins = rewards[:, 0] - rewards[:, 1]
        losses = -(1 - smoothing) * logsigmoid(margins) - smoothing * logsigmoid(-margins)
        if self.sft_weight:
            losses = losses - self.sft_weight * pairs.means[:, 0]
        return rewards, losses
