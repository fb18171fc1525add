"""Hold the limits of what a data file may ask of the machine; each is a setting under data.limits.

A file that goes beyond one is refused, with the setting's name, or its row is. Never opens a file.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from data_modules.facts import setting

MAX_ROW_BYTES = 16 << 20
"""a row above it is refused where nothing else is set"""

MAX_NESTING = 400


@dataclass(kw_only=True, slots=True)
class Limits:
    """Bound what is read; a file beyond a limit is refused, or the row that is beyond it."""

    rows: int = setting(100_000_000, gt=0)
    """rows of a data set; each takes about 100 bytes of memory while training"""
    columns: int = setting(10_000, gt=0)
    """columns of a file, and keys of one object in a row"""
    key_chars: int = setting(1_000, gt=0)
    """characters of a column's name, and of a key in a row"""
    nesting: int = setting(
        100, gt=0, le=MAX_NESTING, note="Python and chat templates can follow no more"
    )
    """lists and objects inside each other in a row"""
    expansion: int = setting(200, gt=0)
    """how many times its size a compressed file may grow to (gz, zst, parquet, arrow); files that
    grow to less than 16 MiB always may"""
    remote_seconds: float = setting(30.0, gt=0)
    """seconds that a URL's server may take to answer, and may be silent"""
    remote_bytes_per_second: int = setting(20_000, gt=0)
    """bytes a second below which a URL is given up; over each MiB, after remote_seconds"""
    remote_bytes: int = setting(1 << 40, gt=0)
    """bytes that are fetched from one URL"""


def too_many(what: str, seen: str, name: str, limit: float) -> str:
    """Word what goes beyond limit `name`, and what to type where it is right."""
    return f"{what} {seen}; data.limits.{name} is {limit:,}; raise it if the data is right"


def why_nested(values: Any, limits: Limits) -> str | None:
    """Return why lists and objects inside each other are refused; None where they are not."""
    level: list[Any] = [values]
    for _ in range(limits.nesting):
        level = [
            one
            for value in level
            for one in (value.values() if isinstance(value, dict) else value)
            if isinstance(one, (dict, list))
        ]
        if not level:
            return None
    return too_deep(limits)


def too_deep(limits: Limits) -> str:
    """Refuse what is nested too deeply."""
    return too_many("is nested", f"more than {limits.nesting:,} deep", "nesting", limits.nesting)


def why_names(names: Collection[str], limits: Limits) -> str | None:
    """Return why names of columns or keys of an object are refused; None where they are not."""
    if len(names) > limits.columns:
        return too_many("has", f"{len(names):,} columns or keys", "columns", limits.columns)
    longest = max(map(len, names), default=0)
    if longest > limits.key_chars:
        return too_many("has", f"a key of {longest:,} characters", "key_chars", limits.key_chars)
    return None
