"""What does not go together and what is out of range: why, and what to type.

`check` gathers the ONE TABLE; its rows stand by subject in `..._rows`, numbers in `ranges`, what
ranks divide in `layout`. Judges values that are of the right type already. Needs no torch: devices
are counted as files, and `check_devices` and `check_global_batch` can be asked again once torch has
counted them.
"""

from app.preflight.couplings.check import COUPLINGS, check_compatibility
from app.preflight.couplings.layout import check_devices, check_global_batch, check_layout
from app.preflight.couplings.ranges import RANGES
from app.preflight.couplings.situation import num_data_ranks, num_ranks, ranks_per_node

__all__ = [
    "COUPLINGS",
    "RANGES",
    "check_compatibility",
    "check_devices",
    "check_global_batch",
    "check_layout",
    "num_data_ranks",
    "num_ranks",
    "ranks_per_node",
]
