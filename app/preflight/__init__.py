"""The checks that need no torch: what is wrong, where, and what to type.

`couplings` finds settings that cannot be combined. `files` checks what they name: the base
(`base_model`, which also identifies it) and a saved adapter.
"""

from app.preflight.base_model import describe_base
from app.preflight.couplings import check_compatibility
from app.preflight.couplings.devices import (
    check_devices,
    check_global_batch,
    check_gpus,
    check_layout,
    count_gpus,
    requested_devices,
)
from app.preflight.files import check_files
