"""Build the objective of a run from its settings."""

from __future__ import annotations

from app.training.objective.dpo import Dpo
from app.training.objective.objective import Objective
from app.training.objective.settings import DpoConfig, ObjectiveConfig
from app.training.objective.sft import Sft


def build_objective(config: ObjectiveConfig) -> Objective:
    """Build the objective that `config` chooses."""
    return Dpo(config) if isinstance(config, DpoConfig) else Sft()
