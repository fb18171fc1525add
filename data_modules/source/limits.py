"""Limits on the resources that a data file may take; each is a setting under data.limits.

A file, or a row, beyond a limit is refused with the setting's name. Never opens a file.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from common.facts import setting

MAX_ROW_BYTES = 16 << 20
"""default limit of a row"""

_MAX_NESTING = 400


@dataclass(kw_only=True, slots=True)
class Limits:
    """Limits of what is read; a file, or a row, beyond a limit is refused."""

    rows: int = setting(100_000_000, gt=0, le=1 << 40)
    """maximum rows of a data set; each takes about 100 bytes of memory while training"""
    columns: int = setting(10_000, gt=0)
    """maximum columns of a file, and keys of one object in a row"""
    key_chars: int = setting(1_000, gt=0)
    """maximum characters of a column's name, and of a key in a row"""
    nesting: int = setting(
        100, gt=0, le=_MAX_NESTING, note="Python and chat templates cannot nest deeper"
    )
    """maximum depth of nested lists and objects in a row"""
    expansion: int = setting(200, gt=0)
    """maximum ratio of decompressed to compressed size (gz, zst, parquet, arrow); files of less
    than 16 MiB decompressed are always accepted"""
    remote_seconds: float = setting(30.0, gt=0)
    """time-out of a URL's server, to answer and between two pieces of data, in seconds"""
    remote_bytes_per_second: int = setting(20_000, gt=0)
    """minimum rate of a download in bytes a second, over each MiB after remote_seconds; slower ones
    are aborted"""
    remote_bytes: int = setting(1 << 40, gt=0, le=1 << 60)
    """maximum bytes downloaded from one URL"""


def too_many(what: str, seen: str, name: str, limit: float) -> str:
    """Return the message that limit `name` is exceeded, with what to type if the data is right."""
    return f"{what} {seen}; data.limits.{name} is {limit:,}; raise it if the data is right"


def nesting_error(values: Any, limits: Limits) -> str | None:
    """Return why nested values are refused; None if they are not."""
    level: list[Any] = [values]
    for _ in range(limits.nesting):
        level = [
            child
            for value in level
            for child in (value.values() if isinstance(value, dict) else value)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return None
    return too_deep(limits)


def too_deep(limits: Limits) -> str:
    """Return the message that a value is nested too deeply."""
    return too_many("is nested", f"more than {limits.nesting:,} deep", "nesting", limits.nesting)


def names_error(names: Collection[str], limits: Limits) -> str | None:
    """Return why column names, or the keys of an object, are refused; None if they are not."""
    if len(names) > limits.columns:
        return too_many("has", f"{len(names):,} columns or keys", "columns", limits.columns)
    longest = max(map(len, names), default=0)
    if longest > limits.key_chars:
        return too_many("has", f"a key of {longest:,} characters", "key_chars", limits.key_chars)
    return None
