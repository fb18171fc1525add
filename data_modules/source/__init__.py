"""Read rows from files, folders, URLs, the hub and the samples; each keeps file and line."""

from data_modules.source.source import (
    MAX_RAW,
    MAX_ROW_BYTES,
    BadRow,
    Budget,
    Chunk,
    Part,
    check_split,
    find_files,
    fingerprint,
    is_generated,
    is_hub_id,
    is_remote,
    is_url,
    name_of,
    read_chunks,
    read_rows,
)

__all__ = [
    "MAX_RAW",
    "MAX_ROW_BYTES",
    "BadRow",
    "Budget",
    "Chunk",
    "Part",
    "check_split",
    "find_files",
    "fingerprint",
    "is_generated",
    "is_hub_id",
    "is_remote",
    "is_url",
    "name_of",
    "read_chunks",
    "read_rows",
]
