"""Hold some rows of a file, parsed only when they are needed, in any process.

Decides what a readable row is and how another one is reported; a bad row stays a bad row in
its place. Never opens a file, and never looks at what a row means.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from data_modules.messages import DataError, Origin
from data_modules.source import opening
from data_modules.source.limits import MAX_ROW_BYTES, Limits
from data_modules.source.opening import Budget
from data_modules.types import Row

MAX_RAW = 2000
"""characters of a bad row's text that are kept"""
_CHUNK_ROWS = 1000


@dataclass(frozen=True, slots=True)
class BadRow:
    """Stand in place of a row that cannot be read.

    `reason` is without the origin; `raw` is at most 2,000 characters of the row's text.
    """

    origin: Origin
    reason: str
    raw: str
    column: int | None = None

    @property
    def problem(self) -> str:
        """Return place and reason in one line."""
        column = "" if self.column is None else f":{self.column}"
        return f"{self.origin}{column} {self.reason}"


@dataclass(frozen=True, slots=True)
class Chunk(ABC):
    """Hold some rows of one file, not parsed yet where that can wait; cheap to pickle.

    `num_bytes` is about what was read for it, decompressed.
    """

    file: str
    num_bytes: int

    @abstractmethod
    def rows(self) -> Iterator[Row | BadRow]:
        """Parse and yield the rows, in order; one that cannot be read is a BadRow in its place."""

    @abstractmethod
    def count(self) -> int:
        """Return how many rows there are, good and bad, without parsing them."""

    @abstractmethod
    def select(self, kept: range) -> Chunk:
        """Return a chunk of the rows with these numbers, counted from 0."""


@dataclass(frozen=True, slots=True)
class RowChunk(Chunk):
    """Hold rows that are read already."""

    read: tuple[Row | BadRow, ...]

    def rows(self) -> Iterator[Row | BadRow]:
        """Yield the rows."""
        return iter(self.read)

    def count(self) -> int:
        """Return how many rows there are."""
        return len(self.read)

    def select(self, kept: range) -> Chunk:
        """Return a chunk of the rows with these numbers, counted from 0."""
        return replace(self, read=tuple(self.read[number] for number in kept))


def grouped(rows: Iterator[tuple[int, Row | BadRow]], file: str) -> Iterator[RowChunk]:
    """Yield rows in chunks of about 1 MB; each row comes with its size."""
    group: list[Row | BadRow] = []
    total = 0
    try:
        for size, row in rows:
            group.append(row)
            total += size
            if total >= opening.CHUNK_BYTES or len(group) == _CHUNK_ROWS:
                yield RowChunk(file, total, tuple(group))
                group, total = [], 0
    except DataError:
        # What was read before the break counts too.
        if group:
            yield RowChunk(file, total, tuple(group))
        raise
    if group:
        yield RowChunk(file, total, tuple(group))


def too_large(origin: Origin, size: str, max_row_bytes: int, raw: str) -> BadRow:
    """Refuse a row; `size` is in bytes, as text."""
    reason = (
        f"row of {size} bytes; data.max_row_bytes is {max_row_bytes:,}; raise it, or leave the "
        "row out"
    )
    return BadRow(origin, reason, raw[:MAX_RAW])


def not_utf8(origin: Origin, data: bytes) -> BadRow | None:
    """Name the first byte that is not UTF-8; None where all are."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        before = data[: error.start]
        place = Origin(origin.file, origin.line + before.count(b"\n"))
        column = error.start - before.rfind(b"\n")
        reason = (
            f"byte 0x{data[error.start]:02X} at column {column} is not "
            "UTF-8 (latin-1?); save the file as UTF-8"
        )
        return BadRow(place, reason, data[: 4 * MAX_RAW].decode(errors="replace")[:MAX_RAW])
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadOptions:
    """Say how much of a file is read, and which of its rows are too large."""

    budget: Budget | None = None
    max_row_bytes: int = MAX_ROW_BYTES
    limits: Limits = field(default_factory=Limits)
