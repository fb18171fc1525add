"""Identity preference optimization: answers differ by a fixed margin, not by an ever larger one."""

from __future__ import annotations

from torch import Tensor

from app.training.objective.pairs import Pairs
from app.training.objective.settings import IpoConfig


class Ipo:
    """(r_chosen - r_rejected - 1 / (2 beta))^2, r: log-probability of an answer minus the base's.

    Equation 17 of arXiv 2310.12036. With `length_normalized`, r is per token, as its authors later
    advised: answers of a hundred tokens otherwise differ by more than the margin from the start.
    """

    def __init__(self, config: IpoConfig) -> None:
        self.beta, self.length_normalized = config.beta, config.length_normalized
        self.first_loss = (0.5 / config.beta) ** 2 if config.compares_with_base else None

    def losses(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Return the rewards beta r [pairs, 2], and the losses [pairs]."""
        gains = pairs.gains_per_token if self.length_normalized else pairs.gains
        losses = (gains[:, 0] - gains[:, 1] - 0.5 / self.beta).square()
        return self.beta * gains, losses
