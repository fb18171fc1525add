"""The settings of the objectives. Imports nothing heavy; `build.py` builds an objective."""

from __future__ import annotations

from dataclasses import dataclass

from common.facts import setting


@dataclass(kw_only=True, slots=True)
class ObjectiveConfig:
    """What is minimized: the cross-entropy of the trained tokens."""

    name: str = setting("sft", grants="nothing")
    """objective: sft (answers), or dpo, ipo, orpo or simpo (pairs of a chosen and a rejected
    answer)"""

    @property
    def row_format(self) -> str | None:
        """The format of the rows that it needs; None for any of single answers."""
        return None

    @property
    def lr_ratio(self) -> float:
        """Ratio of its usual learning rate to that of sft."""
        return 1.0

    @property
    def compares_with_base(self) -> bool:
        """Whether it needs the base beside the trained model."""
        return False

    @property
    def reference_source(self) -> str:
        """Where the base's log-probabilities come from: base, cached or none."""
        return "base" if self.compares_with_base else "none"


@dataclass(kw_only=True, slots=True)
class PairConfig(ObjectiveConfig):
    """What the objectives of preference pairs share."""

    @property
    def row_format(self) -> str:
        """Rows are preference pairs."""
        return "preference"

    @property
    def lr_ratio(self) -> float:
        """A tenth: the sum over an answer has larger gradients than the mean over tokens."""
        return 0.1

    @property
    def compares_with_base(self) -> bool:
        """Whether log-probabilities count relative to those of the model without its adapter."""
        return True


@dataclass(kw_only=True, slots=True)
class ReferencedConfig(PairConfig):
    """What the objectives share that compare with the base."""

    reference: str = setting("base", choices=("base", "cached", "none"))
    """log-probabilities of the base: base (the adapter switched off, a forward pass at each step);
    cached (computed once before the first step and stored in data.cache_dir, also for
    adapter=full); none (they count as 0)"""

    @property
    def compares_with_base(self) -> bool:
        """Whether log-probabilities count relative to those of the base."""
        return self.reference != "none"

    @property
    def reference_source(self) -> str:
        """As the setting says."""
        return self.reference


@dataclass(kw_only=True, slots=True)
class DpoConfig(ReferencedConfig):
    """Direct preference optimization (arXiv 2305.18290): chosen answers above rejected ones, by
    their log-probabilities relative to the base, which is the model without its adapter.
    """

    name: str = "dpo"
    beta: float = setting(0.1, gt=0, le=100, note="0.01 to 0.5 is usual")
    """how closely the model stays at the base: higher is closer"""
    label_smoothing: float = setting(0.0, ge=0, lt=0.5)
    """share of pairs whose answers are expected to be exchanged (cDPO)"""
    sft_weight: float = setting(0.0, ge=0, le=100, note="0.1 to 1 is usual")
    """weight of the chosen answer's cross-entropy per token, which keeps it likely (RPO)"""


@dataclass(kw_only=True, slots=True)
class IpoConfig(ReferencedConfig):
    """Identity preference optimization (arXiv 2310.12036): as dpo, up to a fixed margin, so that
    few or noisy pairs are not learned by heart.
    """

    name: str = "ipo"
    beta: float = setting(0.1, gt=0, le=100, note="0.01 to 0.5 is usual")
    """the margin is 1 / (2 beta)"""
    length_normalized: bool = True
    """compare log-probabilities per token"""


@dataclass(kw_only=True, slots=True)
class OrpoConfig(PairConfig):
    """Odds-ratio preference optimization (arXiv 2403.07691): SFT and preference in one, without a
    reference; for a base that was not fine-tuned.
    """

    name: str = "orpo"
    beta: float = setting(0.1, gt=0, le=100, note="0.05 to 0.3 is usual")
    """weight of the odds ratio beside the chosen answer's cross-entropy (lambda in the paper)"""

    @property
    def compares_with_base(self) -> bool:
        """No: odds are those of the model."""
        return False


@dataclass(kw_only=True, slots=True)
class SimpoConfig(PairConfig):
    """Simple preference optimization (arXiv 2405.14734): log-probabilities per token, by a margin,
    without a reference.
    """

    name: str = "simpo"
    beta: float = setting(2.0, gt=0, le=100, note="2 to 10 is usual")
    """scale of the difference of log-probabilities per token"""
    margin: float = setting(1.0, ge=0, le=100, note="0.5 to 1.6 with beta=2 is usual")
    """by how much the chosen answer's must be larger, after that scale (gamma in the paper)"""

    @property
    def compares_with_base(self) -> bool:
        """No: log-probabilities are those of the model."""
        return False


OBJECTIVES: dict[str, type[ObjectiveConfig]] = {
    "sft": ObjectiveConfig,
    "dpo": DpoConfig,
    "ipo": IpoConfig,
    "orpo": OrpoConfig,
    "simpo": SimpoConfig,
}
"""option of the group -> its settings"""
