"""Everything that can be known before torch is imported: what is wrong, where, and what to type.

`couplings` has the settings that do not go together, `files` looks at what they name: at a base
(`base_model`, with the names and shapes of its modules from `shapes`) and at a saved adapter.
`fingerprint` tells bases apart.
"""

from app.preflight.couplings import (
    check_compatibility,
    check_devices,
    check_global_batch,
    check_gpus,
    check_layout,
    count_gpus,
    requested_devices,
)
from app.preflight.files import check_files
from app.preflight.fingerprint import describe_base

__all__ = [
    "check_compatibility",
    "check_devices",
    "check_files",
    "check_global_batch",
    "check_gpus",
    "check_layout",
    "count_gpus",
    "describe_base",
    "requested_devices",
]
