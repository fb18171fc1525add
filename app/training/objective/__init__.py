"""What a run minimizes: an objective, and the exact sums of its losses."""

from app.training.objective.objective import Losses, Objective, batch_loss, validate
from app.training.objective.sft import Sft
from app.training.objective.sums import DatasetSums, RowSums, losses_by_dataset

__all__ = [
    "DatasetSums",
    "Losses",
    "Objective",
    "RowSums",
    "Sft",
    "batch_loss",
    "losses_by_dataset",
    "validate",
]
