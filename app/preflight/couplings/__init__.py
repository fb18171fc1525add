"""What does not go together: why, and what to type instead.

`check` gathers the ONE TABLE; its rows stand by subject in `..._rows`, what ranks divide in
`layout`; what a single setting may be stands at its field. Needs no torch: devices are counted as
files, and `check_devices` and `check_global_batch` can be called again once torch has counted them.
"""

from app.preflight.couplings.check import COUPLINGS, check_compatibility
from app.preflight.couplings.layout import check_devices, check_global_batch, check_layout
from app.preflight.couplings.situation import num_data_ranks, num_ranks, ranks_per_node

__all__ = [
    "COUPLINGS",
    "check_compatibility",
    "check_devices",
    "check_global_batch",
    "check_layout",
    "num_data_ranks",
    "num_ranks",
    "ranks_per_node",
]
