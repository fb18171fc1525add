"""Simple preference optimization: chosen above rejected answers by a margin, per token."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from app.training.objective.pairs import Pairs
from app.training.objective.settings import SimpoConfig


class Simpo:
    """-log sigmoid(beta (log p_chosen - log p_rejected) - margin), log p: per token.

    Equation 6 of arXiv 2405.14734.
    """

    first_loss: float | None = None

    def __init__(self, config: SimpoConfig) -> None:
        self.beta, self.margin = config.beta, config.margin

    def losses(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Return the rewards beta log p [pairs, 2], and the losses [pairs]."""
        rewards = self.beta * pairs.means
        return rewards, -logsigmoid(rewards[:, 0] - rewards[:, 1] - self.margin)
