"""Build the objective of a run from its settings."""

from __future__ import annotations

from app.training.objective.dpo import Dpo
from app.training.objective.ipo import Ipo
from app.training.objective.objective import Objective
from app.training.objective.orpo import Orpo
from app.training.objective.pairs import PairObjective
from app.training.objective.settings import (
    DpoConfig,
    IpoConfig,
    ObjectiveConfig,
    OrpoConfig,
    SimpoConfig,
)
from app.training.objective.sft import Sft
from app.training.objective.simpo import Simpo


def build_objective(config: ObjectiveConfig) -> Objective:
    """Build the objective that `config` chooses."""
    if isinstance(config, DpoConfig):
        return PairObjective(Dpo(config), config.reference)
    if isinstance(config, IpoConfig):
        return PairObjective(Ipo(config), config.reference)
    if isinstance(config, OrpoConfig):
        return PairObjective(Orpo(config))
    if isinstance(config, SimpoConfig):
        return PairObjective(Simpo(config))
    return Sft()
