"""What does not go together: why, and what to type instead.

`table` has the couplings of two or more settings, `devices` what the settings ask for of a machine
and how ranks divide what they share; what a single setting may be stands at its field. Needs no
torch: GPUs are counted by their device files; `check_devices`, `check_layout` and
`check_global_batch` are called again once torch has counted them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.preflight.couplings.devices import (
    check_devices,
    check_global_batch,
    check_gpus,
    check_layout,
    count_gpus,
    is_evaluation,
    is_training,
    num_ranks,
    requested_devices,
)
from app.preflight.couplings.table import find_clashes
from data_modules import check_values

if TYPE_CHECKING:
    from app.config.verbs import EvaluateConfig, TrainConfig

__all__ = [
    "check_compatibility",
    "check_devices",
    "check_global_batch",
    "check_gpus",
    "check_layout",
    "count_gpus",
    "is_evaluation",
    "is_training",
    "num_ranks",
    "requested_devices",
]


def check_compatibility(
    config: TrainConfig | EvaluateConfig,
    num_gpus: int | None = None,
    *,
    on_this_machine: bool = True,
) -> list[str]:
    """List the numbers out of range, and if there are none, what does not go together.

    `num_gpus`: GPUs of this machine, counted when not given. `on_this_machine` False leaves out
    what may be right on another machine.
    """
    if problems := check_values(config, skip=("data",)):  # check_datasets has those of the data
        return problems
    devices = requested_devices(config, num_gpus if on_this_machine else num_gpus or 0)
    problems = [
        f"{clash.why}; type {clash.instead}"
        for clash in find_clashes(config, devices)
        if on_this_machine or not clash.is_of_machine
    ]
    if is_training(config):
        trainer = config.trainer
        if on_this_machine:
            problems += check_devices(trainer, devices.num_gpus if devices.on_gpu else None)
        # A preview may be for a machine whose GPUs nobody has counted.
        if on_this_machine or isinstance(trainer.devices, int):
            problems += check_layout(config.strategy, trainer, devices.ranks_per_node)
        problems += check_global_batch(trainer, devices.num_ranks, devices.num_data_ranks)
    return problems
