"""What trains, counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.model.quantization import storage_of

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class TrainableReport:
    """What trains: numbers of weights, what they are kept in, and the bytes that takes."""

    num_trainable: int
    num_total: int
    dtypes: dict[str, int]
    num_bytes: int

    def __str__(self) -> str:
        share = self.num_trainable / self.num_total
        dtypes = ", ".join(f"{count:,} in {name}" for name, count in sorted(self.dtypes.items()))
        counts = f"{self.num_trainable:,} of {self.num_total:,}"
        mib = self.num_bytes / 2**20
        size = f"{mib:,.1f} MiB" if mib < 1024 else f"{mib / 1024:,.1f} GiB"
        return f"{counts} weights train ({share:.2%}); kept: {dtypes}, together {size}"


def report_trainable(model: torch.nn.Module) -> TrainableReport:
    """Count what trains; ValueError when nothing does."""
    dtypes: dict[str, int] = {}
    trainable = num_bytes = 0
    for parameter in model.parameters():
        storage = storage_of(parameter)
        dtypes[storage.dtype] = dtypes.get(storage.dtype, 0) + storage.num_weights
        num_bytes += storage.num_bytes
        trainable += storage.num_weights if parameter.requires_grad else 0
    if not trainable:
        raise ValueError("no weight would be trained: look at adapter.target_modules")
    return TrainableReport(trainable, sum(dtypes.values()), dtypes, num_bytes)
