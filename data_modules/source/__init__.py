"""Reads rows from files, folders, URLs, the hub and the samples; each keeps its file and line."""

from data_modules.source.hub import explain_refusal
from data_modules.source.limits import MAX_ROW_BYTES, Limits
from data_modules.source.locating import (
    is_generated,
    is_hub_id,
    is_remote,
    is_url,
    name_of,
)
from data_modules.source.opening import MAX_RAW, BadRow, Budget, Chunk, open_regular
from data_modules.source.slices import Part, check_split
from data_modules.source.source import (
    find_files,
    fingerprint,
    notes_on_files,
    num_bytes,
    read_chunks,
    read_rows,
    resolved_revision,
)

__all__ = [
    "MAX_RAW",
    "MAX_ROW_BYTES",
    "BadRow",
    "Budget",
    "Chunk",
    "Limits",
    "Part",
    "check_split",
    "explain_refusal",
    "find_files",
    "fingerprint",
    "is_generated",
    "is_hub_id",
    "is_remote",
    "is_url",
    "name_of",
    "notes_on_files",
    "num_bytes",
    "open_regular",
    "read_chunks",
    "read_rows",
    "resolved_revision",
]
