"""Build the objective of a run from its settings."""

from __future__ import annotations

from collections.abc import Sequence

from app.training.objective.classify import Classify, Reward
from app.training.objective.dpo import Dpo
from app.training.objective.ipo import Ipo
from app.training.objective.kto import Kto
from app.training.objective.objective import Objective
from app.training.objective.orpo import Orpo
from app.training.objective.pairs import PairObjective
from app.training.objective.settings import (
    ClassifyConfig,
    DpoConfig,
    IpoConfig,
    KtoConfig,
    ObjectiveConfig,
    OrpoConfig,
    RewardConfig,
    SimpoConfig,
)
from app.training.objective.sft import Sft
from app.training.objective.simpo import Simpo


def build_objective(config: ObjectiveConfig, labels: Sequence[str] = ()) -> Objective:
    """Build the objective that `config` chooses; `labels`: names of the outputs of the head."""
    if isinstance(config, ClassifyConfig):
        return Classify(config, labels)
    if isinstance(config, RewardConfig):
        return Reward(config)
    if isinstance(config, DpoConfig):
        return PairObjective(Dpo(config), config.reference)
    if isinstance(config, IpoConfig):
        return PairObjective(Ipo(config), config.reference)
    if isinstance(config, OrpoConfig):
        return PairObjective(Orpo(config))
    if isinstance(config, SimpoConfig):
        return PairObjective(Simpo(config))
    if isinstance(config, KtoConfig):
        return Kto(config)
    return Sft()
