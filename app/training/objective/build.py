"""Build the objective of a run from its settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from app.model.base import ModelConfig
from app.training.objective.classify import Classify, Reward
from app.training.objective.distill import Distill, Teacher
from app.training.objective.kto import Kto
from app.training.objective.objective import Objective, Sft
from app.training.objective.pair_losses import PAIR_LOSSES
from app.training.objective.pairs import PairObjective
from app.training.objective.settings import ClassifyConfig, DistillConfig, ObjectiveConfig

_OTHERS: dict[str, Callable[[Any], Objective]] = {
    "sft": lambda _: Sft(),
    "kto": Kto,
    "reward": Reward,
}


def build_objective(
    config: ObjectiveConfig,
    model: ModelConfig | None = None,
    teacher: Teacher | None = None,
) -> Objective:
    """Build the objective that `config` chooses.

    `model`: names the outputs of a head for classes; `teacher`: for objective=distill.
    """
    if isinstance(config, ClassifyConfig):
        assert model is not None
        return Classify(config, model.labels, is_multi_label=model.multi_label)
    if isinstance(config, DistillConfig):
        assert teacher is not None
        return Distill(config, teacher)
    if config.name in PAIR_LOSSES:
        return PairObjective(config, PAIR_LOSSES[config.name])
    return _OTHERS[config.name](config)
