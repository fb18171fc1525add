"""The settings of the objectives. Imports nothing heavy; `build.py` builds an objective."""

from __future__ import annotations

from dataclasses import dataclass

from common.facts import setting


@dataclass(kw_only=True, slots=True)
class ObjectiveConfig:
    """What is minimized: the cross-entropy of the trained tokens."""

    name: str = setting("sft", grants="nothing")
    """objective: sft (answers) or dpo (pairs of a chosen and a rejected answer)"""

    @property
    def row_format(self) -> str | None:
        """The format of the rows that it needs; None for any of single answers."""
        return None

    @property
    def lr_ratio(self) -> float:
        """Ratio of its usual learning rate to that of sft."""
        return 1.0


@dataclass(kw_only=True, slots=True)
class DpoConfig(ObjectiveConfig):
    """Direct preference optimization (arXiv 2305.18290): chosen answers above rejected ones, by
    their log-probabilities relative to the base, which is the model without its adapter.
    """

    name: str = "dpo"
    beta: float = setting(0.1, gt=0, le=100, note="0.01 to 0.5 is usual")
    """how closely the model stays at the base: higher is closer"""
    label_smoothing: float = setting(0.0, ge=0, lt=0.5)
    """share of pairs whose answers are expected to be exchanged (cDPO)"""

    @property
    def row_format(self) -> str:
        """Rows are preference pairs."""
        return "preference"

    @property
    def lr_ratio(self) -> float:
        """A tenth: the sum over an answer has larger gradients than the mean over tokens."""
        return 0.1


OBJECTIVES: dict[str, type[ObjectiveConfig]] = {"sft": ObjectiveConfig, "dpo": DpoConfig}
"""option of the group -> its settings"""
