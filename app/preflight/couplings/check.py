"""ONE TABLE of what does not go together, gathered by subject, and the function that asks it."""

from __future__ import annotations

from typing import Any

from app.preflight.couplings.data_rows import DATA_ROWS
from app.preflight.couplings.deepspeed_rows import DEEPSPEED_ROWS
from app.preflight.couplings.device_rows import DEVICE_ROWS
from app.preflight.couplings.layout import check_devices, check_global_batch, check_layout
from app.preflight.couplings.model_rows import MODEL_ROWS
from app.preflight.couplings.sharding_rows import SHARDING_ROWS
from app.preflight.couplings.situation import find_situation, has_setting
from app.preflight.couplings.training_rows import TRAINING_ROWS
from data_modules import check_values

COUPLINGS = (
    *DEVICE_ROWS,
    *DEEPSPEED_ROWS,
    *SHARDING_ROWS,
    *TRAINING_ROWS,
    *DATA_ROWS,
    *MODEL_ROWS,
)
"""the table; an empty result means that nothing clashes"""


def check_compatibility(
    config: Any, num_gpus: int | None = None, *, on_this_machine: bool = True
) -> list[str]:
    """List the numbers out of range, and if there are none, what does not go together.

    `num_gpus`: GPUs of this machine, counted when not given. `on_this_machine` False leaves out
    what another machine may have.
    """
    if num_gpus is None and not on_this_machine:
        num_gpus = 0
    situation = find_situation(config, num_gpus)
    if problems := check_values(config, skip=("data",)):  # check_datasets has those of the data
        return problems
    problems = [
        f"{row.why(situation)}; type {row.instead(situation)}"
        for row in COUPLINGS
        if (on_this_machine or not row.is_of_machine)
        and all(has_setting(config, key) for key in row.reads.split())
        and row.clashes(situation)
    ]
    if has_setting(config, "trainer.devices"):
        if on_this_machine:
            on_gpu = situation.on_gpu
            problems += check_devices(config.trainer, situation.num_gpus if on_gpu else None)
        # A preview may be of a machine whose GPUs nobody has counted.
        if on_this_machine or isinstance(config.trainer.devices, int):
            problems += check_layout(config.strategy, config.trainer, situation.ranks_per_node)
        problems += check_global_batch(
            config.trainer, situation.num_ranks, situation.num_data_ranks
        )
    return problems
