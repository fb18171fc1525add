"""Settings that cannot be combined: why, and what to type instead.

`table` joins the conflicts between settings, which stand in `model`, `data`, `training` and
`strategy`. `unused` has the settings without effect, `devices` the requested devices and ranks, and
whether batches and shards divide by them. The range of a single
setting is declared at its field. Needs no torch: GPUs are counted by their device files;
`check_devices`, `check_layout` and `check_global_batch` are called again once torch has counted
them.
"""

from app.preflight.couplings.devices import (
    check_devices,
    check_global_batch,
    check_gpus,
    check_layout,
    count_gpus,
    has_data,
    is_merge,
    is_on_tuned,
    is_training,
    requested_devices,
)
from app.preflight.couplings.table import check_compatibility

__all__ = [
    "check_compatibility",
    "check_devices",
    "check_global_batch",
    "check_gpus",
    "check_layout",
    "count_gpus",
    "has_data",
    "is_merge",
    "is_on_tuned",
    "is_training",
    "requested_devices",
]
