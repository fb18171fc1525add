"""What trains, counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class TrainableReport:
    """What trains: numbers of weights, and their dtypes."""

    num_trainable: int
    num_total: int
    dtypes: dict[str, int]

    def __str__(self) -> str:
        share = self.num_trainable / self.num_total
        dtypes = ", ".join(f"{count:,} in {name}" for name, count in sorted(self.dtypes.items()))
        counts = f"{self.num_trainable:,} of {self.num_total:,}"
        return f"{counts} weights train ({share:.2%}); kept: {dtypes}"


def report_trainable(model: torch.nn.Module) -> TrainableReport:
    """Count what trains; ValueError when nothing does."""
    dtypes: dict[str, int] = {}
    trainable = 0
    for parameter in model.parameters():
        name = str(parameter.dtype).removeprefix("torch.")
        dtypes[name] = dtypes.get(name, 0) + parameter.numel()
        trainable += parameter.numel() if parameter.requires_grad else 0
    if not trainable:
        raise ValueError("no weight would be trained: look at adapter.target_modules")
    return TrainableReport(trainable, sum(dtypes.values()), dtypes)
