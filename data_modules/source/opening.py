"""Open one file, on disk or remote, decompressed and within a budget; the chunks of its rows.

Decides what may be opened under which name. Rows are passed on in chunks, which are parsed when
they are needed, in any process, with bad rows in place; also which of them a slice of a split has,
as `train[:90%]+validation`. Never interprets a row.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from common.errors import DataError, Origin, RemoteError
from common.files import kind_of
from common.text import unreadable
from data_modules.source.limits import MAX_ROW_BYTES, Limits, too_many
from data_modules.source.remote import BLOCK_BYTES, RemoteStream, Url
from data_modules.types import Row

CHUNK_BYTES = 1 << 20
_SNIFFED_BYTES = 1 << 16
_UTF8_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_COMPRESSIONS = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd"}
_COMPRESSED = re.compile(r"\.(gz|zst)\Z", re.IGNORECASE)
_COMPRESSION_NAMES = {".gz": "gzip-compressed", ".zst": "zstd-compressed"}
_NO_TEXT = {
    b"PAR1": "a parquet file; name it .parquet",
    b"ARROW1": "an arrow file; name it .arrow",
    b"PK\x03\x04": "a zip archive; unpack it",
    b"BZh": "a bzip2 archive; unpack it, or pack it as .gz or .zst",
    b"\xfd7zXZ\0": "an xz archive; unpack it, or pack it as .gz or .zst",
    b"7z\xbc\xaf'\x1c": "a 7z archive; unpack it",
    b"Rar!": "a rar archive; unpack it",
    b"SQLite format 3\0": "a SQLite data base; export its rows",
}
FREE_EXPANSION = 16 << 20
"""decompressed bytes that are accepted whatever the ratio"""
File = Path | Url
MAX_RAW = 2000
"""characters of a bad row's text that are stored"""
_CHUNK_ROWS = 1000
_BOUND = r"-?\d[\d_]*(?:\.\d+)?%?"
_PART = re.compile(rf"([\w.-]+)(?:\[({_BOUND})?:({_BOUND})?\])?")


@dataclass(slots=True)
class Budget:
    """The number of bytes that may still be read."""

    left: int

    @property
    def spent(self) -> bool:
        """Whether nothing more may be read."""
        return self.left <= 0


@dataclass(slots=True)
class Content:
    """The content of a file, as far as the budget allows; `cut` is set if there is more."""

    file: File
    stream: IO[bytes]
    budget: Budget | None
    head: bytes = b""
    cut: bool = False

    def read(self) -> bytes:
        """Return the next CHUNK_BYTES, fewer before the end; b"" at the end."""
        size = CHUNK_BYTES
        if self.budget is not None:
            size = min(size, max(0, self.budget.left))
            if not size:
                self.cut = bool(self.head or self.stream.read(1))
                return b""
        data, self.head = self.head[:size], self.head[size:]
        if len(data) < size:
            data += self.stream.read(size - len(data))
        if self.budget is not None:
            self.budget.left -= len(data)
        return data

    def read_all(self) -> bytes:
        """Return all remaining bytes."""
        return b"".join(iter(self.read, b""))


def suffix_of(name: str) -> str:
    """Return the suffix that determines a file's format: the one before .gz or .zst."""
    return PurePosixPath(_COMPRESSED.sub("", name.lower())).suffix


def stem_of(name: str) -> str:
    """Return a file's name without the suffixes of its format and compression."""
    bare = _COMPRESSED.sub("", name)
    return bare[: len(bare) - len(suffix_of(name))]


def open_regular(file: Path) -> io.BufferedReader:
    """Open a file on disk without ever blocking.

    Raises DataError if it cannot be opened or is not a regular file: a FIFO, a device, a socket or
    a folder. The opened file itself is checked, not the path, which may change meanwhile.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise DataError(special_file(file) or unreadable(file, error)) from error
    if kind := kind_of(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DataError(f"{file}: is {kind}, not a file; give a regular file")
    return os.fdopen(descriptor, "rb")


def special_file(file: Path) -> str | None:
    """Return the message that `file` is not a regular file; None if it is, or on an error."""
    try:
        kind = kind_of(file.stat().st_mode)
    except OSError:
        return None
    return f"{file}: is {kind}, not a file; give a regular file" if kind else None


@contextmanager
def open_text(file: File, budget: Budget | None, limits: Limits) -> Iterator[Content]:
    """Open a text file; raises DataError if its first bytes are those of another format."""
    with _open_bytes(file, limits) as stream:
        head = stream.read(_SNIFFED_BYTES)
        if head.startswith(_UTF16_MARKS) or b"\0\0" in (head[:4:2], head[1:4:2]):
            raise DataError(f"{file}: is UTF-16; save it as UTF-8")
        for start, what in _NO_TEXT.items():
            if head.startswith(start):
                raise DataError(f"{file}: is {what}")
        if b"\r" in head and b"\n" not in head and len(head) > head.index(b"\r") + 1:
            raise DataError(f"{file}: has CR line endings; save it with LF line endings")
        yield Content(file, stream, budget, head.removeprefix(_UTF8_MARK))


@contextmanager
def open_seekable(file: File, limits: Limits) -> Iterator[Any]:
    """Open a file for pyarrow's readers, which seek in it."""
    with _open_bytes(file, limits) as stream:
        if file.suffix.lower() in _COMPRESSIONS:
            with tempfile.TemporaryFile() as unpacked:
                shutil.copyfileobj(stream, unpacked, CHUNK_BYTES)
                unpacked.seek(0)
                yield unpacked
        else:
            # Not memory-mapped: truncating the file while it is read would crash the process.
            yield stream


@contextmanager
def _open_bytes(file: File, limits: Limits) -> Iterator[IO[bytes]]:
    """Open a file, decompressed according to its name; DataError if its bytes contradict that."""
    with open_stored(file) as raw:
        magic = raw.peek(8)[:8]
        found = next((s for s, start in _COMPRESSIONS.items() if magic.startswith(start)), "")
        named = file.suffix.lower() if file.suffix.lower() in _COMPRESSIONS else ""
        if found != named:
            what = (
                f"is {_COMPRESSION_NAMES[found]}; name it {found}"
                if found
                else f"is not {_COMPRESSION_NAMES[named]}; name it without {named}"
            )
            raise DataError(f"{file}: {what}")
        if found == ".gz":
            with gzip.GzipFile(fileobj=raw) as unzipped:
                yield cast("IO[bytes]", _Unpacked(file, cast("IO[bytes]", unzipped), raw, limits))
        elif found == ".zst":
            import pyarrow

            with pyarrow.CompressedInputStream(raw, "zstd") as stream:
                yield cast("IO[bytes]", _Unpacked(file, stream, raw, limits))
        else:
            yield raw


@dataclass(slots=True)
class _Unpacked:
    """The decompressed content of a file; raises DataError beyond the limit of expansion."""

    file: File
    stream: IO[bytes]
    packed: io.BufferedReader
    limits: Limits
    num_bytes: int = 0

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes."""
        data = self.stream.read(size)
        self.num_bytes += len(data)
        check_expansion(self.file, self.num_bytes, self.packed.tell(), self.limits)
        return data


def check_expansion(file: File, num_bytes: int, packed_bytes: int, limits: Limits) -> None:
    """Raise DataError if a file has expanded by more than `limits.expansion`."""
    if num_bytes > max(FREE_EXPANSION, limits.expansion * packed_bytes):
        seen = f"{num_bytes // max(1, packed_bytes):,} times its size"
        problem = too_many("decompresses to", seen, "expansion", limits.expansion)
        raise DataError(f"{file}: {problem}")


def open_stored(file: File) -> io.BufferedReader:
    """Open a file's bytes as stored; raises DataError if that fails."""
    if isinstance(file, Path):
        return open_regular(file)
    try:
        return io.BufferedReader(RemoteStream(file.open, file.limits), BLOCK_BYTES)
    except OSError as error:
        raise RemoteError(unreadable(file, error)) from error


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be read, in its place.

    `reason` does not include the origin; `raw` is at most 2,000 characters of the row's text.
    """

    origin: Origin
    reason: str
    raw: str
    column: int | None = None

    @property
    def problem(self) -> str:
        """The origin and the reason in one line."""
        column = "" if self.column is None else f":{self.column}"
        return f"{self.origin}{column} {self.reason}"


@dataclass(frozen=True, slots=True)
class Chunk(ABC):
    """Some rows of one file, parsed lazily if possible; cheap to pickle.

    `num_bytes` is about the decompressed bytes that were read for it.
    """

    file: str
    num_bytes: int

    @abstractmethod
    def rows(self) -> Iterator[Row | BadRow]:
        """Parse and yield the rows in order, with a BadRow in place of one that cannot be read."""

    @abstractmethod
    def count(self) -> int:
        """Return the number of rows, good and bad, without parsing them."""

    @abstractmethod
    def select(self, kept: range) -> Chunk:
        """Return a chunk of the rows with these indices, from 0."""


@dataclass(frozen=True, slots=True)
class RowChunk(Chunk):
    """Rows that are already parsed."""

    read: tuple[Row | BadRow, ...]

    def rows(self) -> Iterator[Row | BadRow]:
        """Yield the rows."""
        return iter(self.read)

    def count(self) -> int:
        """Return the number of rows."""
        return len(self.read)

    def select(self, kept: range) -> Chunk:
        """Return a chunk of the rows with these indices, from 0."""
        return replace(self, read=tuple(self.read[number] for number in kept))


def grouped(rows: Iterator[tuple[int, Row | BadRow]], file: str) -> Iterator[RowChunk]:
    """Yield `rows`, pairs of size in bytes and row, in chunks of about 1 MB."""
    group: list[Row | BadRow] = []
    total = 0
    try:
        for size, row in rows:
            group.append(row)
            total += size
            if total >= CHUNK_BYTES or len(group) == _CHUNK_ROWS:
                yield RowChunk(file, total, tuple(group))
                group, total = [], 0
    except DataError:
        # The rows before the error count too.
        if group:
            yield RowChunk(file, total, tuple(group))
        raise
    if group:
        yield RowChunk(file, total, tuple(group))


def too_large(origin: Origin, size: str, max_row_bytes: int, raw: str) -> BadRow:
    """Return the BadRow of a row that is too large; `size` is formatted, in bytes."""
    reason = (
        f"row of {size} bytes; data.max_row_bytes is {max_row_bytes:,}; raise it, or remove the row"
    )
    return BadRow(origin, reason, raw[:MAX_RAW])


def not_utf8(origin: Origin, data: bytes) -> BadRow | None:
    """Return a BadRow for the first byte that is not UTF-8; None if there is none."""
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
    """How much of a file is read (`budget` None: all), and the limits of its rows."""

    budget: Budget | None = None
    max_row_bytes: int = MAX_ROW_BYTES
    limits: Limits = field(default_factory=Limits)


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
    known = total if total is not None else 1 << 62
    start = 0 if part.start is None else part.start.resolve(known)
    stop = None if part.stop is None else part.stop.resolve(known)
    if part.is_sliced and (start == total or (stop is not None and stop <= start)):
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
