"""The settings of the objectives. Imports nothing heavy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from common.facts import setting


@dataclass(kw_only=True, slots=True)
class ObjectiveConfig:
    """What is minimized: the cross-entropy of the trained tokens."""

    name: str = setting("sft", grants="nothing")
    """objective: sft (answers); distill (answers, by a teacher's probabilities); dpo, ipo, orpo,
    simpo, reward (pairs of answers); kto (answers with a verdict); classify (texts with a class)"""

    row_format: ClassVar[str | None] = None
    """format of the rows that it needs; None for any of single answers"""
    lr_ratio: ClassVar[float] = 1.0
    """ratio of its usual learning rate to that of sft"""
    has_own_head: ClassVar[bool] = False
    """whether the model has a head of its own in place of the language model's"""
    compared_by: ClassVar[str] = "val/loss"
    """metric by which runs with different settings of the objective are compared"""

    @property
    def reference_source(self) -> str:
        """Where the base's log-probabilities come from: base, cached or none."""
        return "none"

    @property
    def compares_with_base(self) -> bool:
        """Whether log-probabilities count relative to those of the base."""
        return self.reference_source != "none"

    @property
    def first_loss(self) -> float | None:
        """The loss as long as the model equals the base; None if it is not known beforehand."""
        return None

    @property
    def teacher_path(self) -> str | None:
        """Folder or hub id of the model that is learned from."""
        return None


@dataclass(kw_only=True, slots=True)
class PairConfig(ObjectiveConfig):
    """What the objectives of preference pairs share."""

    row_format: ClassVar[str | None] = "preference"
    lr_ratio: ClassVar[float] = 0.1  # a sum over an answer has larger gradients than a token mean
    compared_by: ClassVar[str] = "val/accuracy"  # the loss depends on beta and its like


@dataclass(kw_only=True, slots=True)
class ReferencedConfig(PairConfig):
    """What the objectives share that compare with the base."""

    reference: str = setting("base", choices=("base", "cached", "none"))
    """log-probabilities of the base: base (the adapter switched off, a forward pass at each step);
    cached (computed once before the first step and stored in data.cache_dir, also for
    adapter=full); none (they count as 0)"""

    @property
    def reference_source(self) -> str:
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

    @property
    def first_loss(self) -> float | None:
        """That of a margin of 0."""
        return math.log(2) if self.compares_with_base and not self.sft_weight else None


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

    @property
    def first_loss(self) -> float | None:
        """That of a difference of 0."""
        return (0.5 / self.beta) ** 2 if self.compares_with_base else None


@dataclass(kw_only=True, slots=True)
class OrpoConfig(PairConfig):
    """Odds-ratio preference optimization (arXiv 2403.07691): SFT and preference in one, without a
    reference; for a base that was not fine-tuned.
    """

    name: str = "orpo"
    beta: float = setting(0.1, gt=0, le=100, note="0.05 to 0.3 is usual")
    """weight of the odds ratio beside the chosen answer's cross-entropy (lambda in the paper)"""


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


@dataclass(kw_only=True, slots=True)
class KtoConfig(ReferencedConfig):
    """Kahneman-Tversky optimization (arXiv 2402.01306): single answers that are wanted or not, by
    their log-probabilities relative to the base.
    """

    name: str = "kto"
    reference: str = setting("base", choices=("base", "cached"))
    """log-probabilities of the base: base (the adapter switched off, two forward passes at each
    step); cached (computed once before the first step and stored in data.cache_dir, also for
    adapter=full)"""
    beta: float = setting(0.1, gt=0, le=100, note="0.01 to 0.5 is usual")
    """how closely the model stays at the base: higher is closer"""
    desirable_weight: float = setting(1.0, ge=0, le=100)
    """weight of the losses of answers that are wanted"""
    undesirable_weight: float = setting(1.0, ge=0, le=100)
    """weight of the others; both weights times their numbers of rows should be about equal"""
    row_format: ClassVar[str | None] = "kto"

    @property
    def first_loss(self) -> float | None:
        """That of an advantage of 0, if wanted and other answers weigh the same."""
        is_even = self.desirable_weight == self.undesirable_weight
        return self.desirable_weight / 2 if is_even else None


@dataclass(kw_only=True, slots=True)
class RewardConfig(PairConfig):
    """A reward model: a number for an answer, higher for the chosen one of a pair."""

    name: str = "reward"
    centering: float = setting(0.0, ge=0, le=10, note="0.01 is usual")
    """weight of the square of both rewards' sum, which keeps their mean near 0"""
    lr_ratio: ClassVar[float] = 1.0  # the loss does not grow with the length of an answer
    has_own_head: ClassVar[bool] = True


@dataclass(kw_only=True, slots=True)
class ClassifyConfig(ObjectiveConfig):
    """A classifier: the class of a text, of model.labels; or a number, of a single label."""

    name: str = "classify"
    class_weights: list[float] = setting(default_factory=list)
    """weights of the losses of each class, in the order of model.labels; none = 1 for all"""
    row_format: ClassVar[str | None] = "classification"
    compared_by: ClassVar[str] = "val/accuracy"
    has_own_head: ClassVar[bool] = True


@dataclass(kw_only=True, slots=True)
class DistillConfig(ObjectiveConfig):
    """Distillation (arXiv 1503.02531): the probabilities that a larger model, the teacher, gives
    the next token are learned, at each trained token of the rows.
    """

    name: str = "distill"
    compared_by: ClassVar[str] = "val/cross_entropy"
    teacher: str | None = setting(None, is_path=True)
    """folder or hub id of the teacher, which has the vocabulary of the base"""
    teacher_quantization: str = setting("none", choices=("none", "nf4"))
    """precision of the teacher's weights: none (that of frozen weights), or nf4"""
    teacher_logits: str = setting("live", choices=("live", "cached"))
    """what the teacher says: live (a forward pass in each step); cached (its likeliest next tokens
    at each trained token, computed once before the first step and stored in data.cache_dir)"""
    teacher_top_k: int = setting(64, ge=1, le=2**20)
    """number of the teacher's likeliest tokens that are stored, 8 bytes each; the others count as
    impossible"""
    direction: str = setting("forward", choices=("forward", "reverse"))
    """KL divergence: forward (learn everything that the teacher may say), or reverse (learn what it
    says most, as small models do better)"""
    temperature: float = setting(1.0, gt=0, le=100, note="1 to 4 is usual")
    """divides the logits of both models: higher weighs unlikely tokens more"""
    sft_weight: float = setting(0.0, ge=0, le=100, note="0.1 to 1 is usual")
    """weight of the cross-entropy of the rows' own tokens beside the divergence"""

    @property
    def teacher_path(self) -> str | None:
        return self.teacher


OBJECTIVES: dict[str, type[ObjectiveConfig]] = {
    "sft": ObjectiveConfig,
    "distill": DistillConfig,
    "dpo": DpoConfig,
    "ipo": IpoConfig,
    "orpo": OrpoConfig,
    "simpo": SimpoConfig,
    "kto": KtoConfig,
    "reward": RewardConfig,
    "classify": ClassifyConfig,
}
"""option of the group -> its settings"""
