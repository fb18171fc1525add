"""Slices of a split, as in `train[:90%]+validation`: parsed, resolved to rows, and taken.

Decides which rows of a split are read. Never opens a file.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from fractions import Fraction

from common.errors import DataError
from data_modules.source.opening import Chunk

_BOUND = r"-?\d[\d_]*(?:\.\d+)?%?"
_PART = re.compile(rf"([\w.-]+)(?:\[({_BOUND})?:({_BOUND})?\])?")


@dataclass(frozen=True, slots=True)
class _Bound:
    """One end of a slice: a row number, counted from the end if negative, or a percentage."""

    value: Fraction
    is_percent: bool

    @property
    def needs_total(self) -> bool:
        """Return whether it depends on the number of rows."""
        return self.is_percent or self.value < 0

    def resolve(self, total: int) -> int:
        """Return the row number, from 0; a percentage gives the same row as start and as stop."""
        if self.is_percent:
            value = self.value + 100 if self.value < 0 else self.value
            return min(total, max(0, round(value * total / 100)))
        value = self.value + total if self.value < 0 else self.value
        return min(total, max(0, int(value)))


@dataclass(frozen=True, slots=True)
class Part:
    """The name of a split and a slice of its rows."""

    name: str
    start: _Bound | None = None
    stop: _Bound | None = None

    @property
    def needs_total(self) -> bool:
        """Return whether the slice depends on the number of rows."""
        return any(bound is not None and bound.needs_total for bound in (self.start, self.stop))

    @property
    def is_sliced(self) -> bool:
        """Return whether it is a slice and not the whole split."""
        return self.start is not None or self.stop is not None

    def resolve(self, total: int | None) -> tuple[int, int | None]:
        """Return the first row, from 0, and the row after the last (None: to the end)."""
        known = total if total is not None else 1 << 62
        start = 0 if self.start is None else self.start.resolve(known)
        return start, None if self.stop is None else self.stop.resolve(known)

    def __str__(self) -> str:
        def text(bound: _Bound | None) -> str:
            if bound is None:
                return ""
            return f"{float(bound.value):g}%" if bound.is_percent else str(bound.value)

        cut = f"[{text(self.start)}:{text(self.stop)}]" if self.is_sliced else ""
        return f"{self.name}{cut}"


def check_split(split: str) -> list[Part]:
    """Return the parts of `split`, as in `train[:90%]+validation`; raises ValueError."""
    return [_parse_part(part) for part in split.split("+")]


def rows_of(path: str, part: Part, total: int | None) -> tuple[int, int | None]:
    """Return the first row of the slice, from 0, and the row after the last; raises DataError."""
    if not part.is_sliced:
        return 0, None
    start, stop = part.resolve(total)
    if start == total or (stop is not None and stop <= start):
        rows = "" if total is None else f" of {total:,} rows"
        raise DataError(f"{path}: 0 rows in '{part}'{rows}; give another slice")
    return start, stop


def take(
    chunks: Iterator[Chunk], start: int, stop: int | None, shard: tuple[int, int] = (0, 1)
) -> Generator[Chunk, None, int]:
    """Yield every count-th of the rows from `start` to `stop`; return the number of rows read.

    Rows are not counted if all of them are taken.
    """
    index, count = shard
    position = 0
    if start == 0 and stop is None and count == 1:
        yield from chunks
        return position
    for chunk in chunks:
        num_rows = chunk.count()
        first = max(start - position, 0)
        last = num_rows if stop is None else min(stop - position, num_rows)
        offset = (index - (position + first - start)) % count
        kept = range(num_rows)[first:last][offset::count]
        position += num_rows
        if len(kept) == num_rows:
            yield chunk
        elif kept:
            yield chunk.select(kept)
        if stop is not None and position >= stop:
            break
    return position


def _parse_part(text: str) -> Part:
    match = _PART.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"split '{text}' cannot be read; use NAME, NAME[:90%], NAME[100:200] or NAME+NAME"
        )
    start, stop = (
        None if bound is None else _parse_bound(bound, text) for bound in match.groups()[1:]
    )
    # -10 and 90 cannot be compared until the rows are counted.
    if (
        start is not None
        and stop is not None
        and (start.is_percent, start.value < 0) == (stop.is_percent, stop.value < 0)
        and start.value >= stop.value
    ):
        raise ValueError(f"split '{text}' has no row: its end is not after its start")
    return Part(match[1], start, stop)


def _parse_bound(text: str, whole: str) -> _Bound:
    is_percent = text.endswith("%")
    value = Fraction(text.removesuffix("%").replace("_", ""))
    if is_percent and abs(value) > 100:
        raise ValueError(f"split '{whole}' has {text}; use a percentage up to 100")
    if not is_percent and value.denominator != 1:
        raise ValueError(f"split '{whole}' has row {text}; use a whole number, or a percentage")
    return _Bound(value, is_percent)
