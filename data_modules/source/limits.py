"""Hold the limits of what a data file may ask of the machine; each is a setting under data.limits.

A file that goes beyond one is refused, with the setting's name, or its row is. Never opens a file.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any

MAX_ROW_BYTES = 16 << 20
"""a row above it is refused where nothing else is set"""

MAX_NESTING = 400


@dataclass(kw_only=True, slots=True)
class Limits:
    """Bound what is read; a file beyond a limit is refused, or the row that is beyond it."""

    rows: int = 100_000_000
    """rows of a data set; each takes about 100 bytes of memory while training"""
    columns: int = 10_000
    """columns of a file, and keys of one object in a row"""
    key_chars: int = 1_000
    """characters of a column's name, and of a key in a row"""
    nesting: int = 100
    """lists and objects inside each other in a row"""
    expansion: int = 200
    """how many times its size a compressed file may grow to (gz, zst, parquet, arrow); files that
    grow to less than 16 MiB always may"""
    remote_seconds: float = 30.0
    """seconds that a URL's server may take to answer, and may be silent"""
    remote_bytes_per_second: int = 20_000
    """a slower URL is given up; counted over each MiB, after remote_seconds"""
    remote_bytes: int = 1 << 40
    """bytes that are fetched of one URL"""


def check_limits(limits: Limits) -> list[str]:
    """Return what is wrong with the settings."""
    problems = []
    for field in fields(limits):
        value = getattr(limits, field.name)
        if not (math.isfinite(value) and value > 0):
            problems.append(f"data.limits.{field.name} is {value}; give a number above 0")
    if limits.nesting > MAX_NESTING:
        problems.append(
            f"data.limits.nesting is {limits.nesting:,}; give {MAX_NESTING} or less: Python and "
            "chat templates can follow no more"
        )
    return problems


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
