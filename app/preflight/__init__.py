"""Everything that can be known before torch is imported: what is wrong, where, and what to type.

`compatibility` is the table of settings that do not go together, `files` looks at what they name,
`base_model` reads a base's headers, `targets` and `adapters` compare with them what is put on it.
"""

from app.preflight.couplings import (
    check_compatibility,
    check_devices,
    check_global_batch,
    check_layout,
    num_data_ranks,
    num_ranks,
)
from app.preflight.files import check_files
from app.preflight.fingerprint import describe_base

__all__ = [
    "check_compatibility",
    "check_devices",
    "check_files",
    "check_global_batch",
    "check_layout",
    "describe_base",
    "num_data_ranks",
    "num_ranks",
]
