"""Settings that cannot be combined: why, and what to type instead.

The rows stand in `settings`, those of the strategy in `strategy`, in groups that have a condition
in common. `devices` reads them, and has the settings without effect, the requested devices and
ranks, and whether batches and shards divide by them. The range of a single setting is declared at
its field. Needs no torch: GPUs are counted by their device files; `check_devices`, `check_layout`
and `check_global_batch` are called again once torch has counted them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.preflight.couplings import devices, settings, strategy
from common.facts import check_values

if TYPE_CHECKING:
    from app.config.verbs import TrainConfig, TunedConfig


GROUPS = (*settings.ROWS_OF_SETTINGS, *strategy.ROWS_OF_STRATEGIES)
"""the rows, in the order in which conflicts are listed"""


def check_compatibility(
    config: TrainConfig | TunedConfig, num_gpus: int | None = None, *, on_this_machine: bool = True
) -> list[str]:
    """List the values out of range, or if there are none, the settings that cannot be combined.

    `num_gpus`: GPUs of this machine; counted if None. With `on_this_machine=False`, conflicts that
    depend on the machine are left out.
    """
    if problems := check_values(config, skip=("data",)):  # check_datasets checks those of the data
        return problems
    asked = devices.requested_devices(config, num_gpus if on_this_machine else num_gpus or 0)
    problems = [
        text
        for row, text in devices.find_conflicts(GROUPS, config, asked)
        if on_this_machine or not row.is_of_machine
    ]
    problems += devices.find_unused(config)
    if devices.is_training(config):
        trainer = config.trainer
        if on_this_machine:
            problems += devices.check_devices(trainer, asked.num_gpus if asked.on_gpu else None)
        # A preview may be for another machine, whose number of GPUs is unknown.
        if on_this_machine or isinstance(trainer.devices, int):
            problems += devices.check_layout(config.strategy, trainer, asked.ranks_per_node)
        problems += devices.check_global_batch(trainer, asked.num_ranks, asked.num_data_ranks)
    return problems
