"""Open one file, on disk or remote, decompressed and within its limits; the chunks of its rows.

Decides what may be opened under which name, what a file or a row may take (data.limits), and when a
server is too slow or silent for too long. Rows are passed on in chunks, which are parsed when they
are needed, in any process, with bad rows in place. Never interprets a row.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeVar, cast
from urllib.parse import urlsplit

from common.errors import DataError, Origin, RemoteError
from common.facts import setting
from common.files import kind_of
from common.text import printable, reason_of, unreadable
from common.untrusted import LimitError, call_within
from data_modules.types import Row

MAX_ROW_BYTES = 16 << 20
"""default limit of a row"""
_MAX_NESTING = 400
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
MAX_RAW = 2000
"""characters of a bad row's text that are stored"""
_CHUNK_ROWS = 1000
PACED_BYTES = 1 << 20
"""bytes over which the rate of a server is measured"""
TRY_AGAIN = "try again later, download the file and give its path, or raise the limit"
_Answer = TypeVar("_Answer")
_PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "http": "aiohttp",
    "https": "aiohttp",
}
"""protocol -> package with its file system; the extra `remote` has them all"""


@dataclass(kw_only=True, slots=True)
class ReadLimits:
    """ReadLimits of what is read; a file, or a row, beyond a limit is refused."""

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


def nesting_error(values: Any, limits: ReadLimits) -> str | None:
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


def too_deep(limits: ReadLimits) -> str:
    return too_many("is nested", f"more than {limits.nesting:,} deep", "nesting", limits.nesting)


def names_error(names: Collection[str], limits: ReadLimits) -> str | None:
    """Return why column names, or the keys of an object, are refused; None if they are not."""
    if len(names) > limits.columns:
        return too_many("has", f"{len(names):,} columns or keys", "columns", limits.columns)
    longest = max(map(len, names), default=0)
    if longest > limits.key_chars:
        return too_many("has", f"a key of {longest:,} characters", "key_chars", limits.key_chars)
    return None


@dataclass(frozen=True, slots=True)
class Url:
    """The URL of a file for fsspec; its string has no password and no query."""

    address: str
    limits: ReadLimits = field(default_factory=ReadLimits, compare=False)

    @property
    def name(self) -> str:
        return PurePosixPath(str(self)).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    def open(self) -> IO[bytes]:
        import fsspec

        stream: IO[bytes] = fsspec.open(self.address, "rb", **self.options()).open()
        return stream

    def options(self) -> dict[str, Any]:
        """Return the arguments of its fsspec file system."""
        if not self.address.startswith(("http://", "https://")):
            return {}
        import aiohttp

        seconds = self.limits.remote_seconds
        # The default aborts a request after five minutes, even one that makes progress.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=seconds, sock_read=seconds)
        return {"block_size": PACED_BYTES, "client_kwargs": {"timeout": timeout}}

    def __str__(self) -> str:
        return re.sub(r"(?<=://)[^/@]*@", "", self.address).split("?")[0].split("#")[0]


File = Path | Url


def answer_within(limits: ReadLimits, ask: Callable[[], _Answer]) -> _Answer:
    """Return what `ask` returns; raises TimeoutError after `limits.remote_seconds`."""
    seconds = limits.remote_seconds
    try:
        return call_within(seconds, ask)
    except LimitError as error:
        raise TimeoutError(
            f"no answer within {seconds:g} seconds (data.limits.remote_seconds); {TRY_AGAIN}"
        ) from error


def too_slow(num_bytes: int, seconds: float, limits: ReadLimits) -> str:
    return (
        f"received {num_bytes:,} bytes in {seconds:.0f} seconds; "
        f"data.limits.remote_bytes_per_second is {limits.remote_bytes_per_second:,}; {TRY_AGAIN}"
    )


class _RemoteStream(io.RawIOBase):
    """A remote file; reading raises TimeoutError if the server is too slow, OSError beyond a limit.

    Each MiB may take `remote_seconds` plus its time at `remote_bytes_per_second`.
    """

    def __init__(self, opener: Callable[[], IO[bytes]], limits: ReadLimits) -> None:
        super().__init__()
        self._limits = limits
        self._stream = answer_within(limits, opener)
        self._position = self._num_bytes = self._block = 0
        self._waited = 0.0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._stream.seekable()

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = self._stream.seek(offset, whence)
        return self._position

    def readinto(self, buffer: Any) -> int:
        limits = self._limits
        allowed = limits.remote_seconds + PACED_BYTES / limits.remote_bytes_per_second
        size = min(len(buffer), PACED_BYTES)
        started = time.monotonic()
        try:
            data = call_within(max(0.0, allowed - self._waited), lambda: self._stream.read(size))
        except LimitError as error:
            raise TimeoutError(too_slow(self._block, allowed, limits)) from error
        buffer[: len(data)] = data
        self._waited += time.monotonic() - started
        self._position += len(data)
        self._num_bytes += len(data)
        self._block += len(data)
        if self._block >= PACED_BYTES:
            self._block, self._waited = 0, 0.0
        if self._num_bytes > (most := limits.remote_bytes):
            raise OSError(too_many("sends", f"more than {most:,} bytes", "remote_bytes", most))
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()


def query_remote(url: Url, ask: Callable[[Any, str], Any]) -> Any:
    """Return `ask(file system, path)` for a URL; raises DataError with the reason of a failure."""
    import fsspec

    def answer() -> Any:
        try:
            file_system, place = fsspec.core.url_to_fs(url.address, **url.options())
        except ValueError as error:
            known = "give a URL of https, s3, gs, ..."
            raise DataError(f"{url}: {reason_of(error)}; {known}") from error
        return ask(file_system, place)

    try:
        return answer_within(url.limits, answer)
    except ImportError as error:
        package = _PACKAGES.get(url.address.partition("://")[0].rpartition("::")[2])
        # Naming datasets makes pip keep the fsspec that it needs.
        install = f"; pip install {package} datasets" if package else ""
        raise DataError(
            f"{url}: needs a package that is not installed ({reason_of(error)}){install}"
        ) from error
    except FileNotFoundError as error:
        raise _not_found_error(url, error.__cause__) from error
    except DataError:
        raise
    except Exception as error:
        # Each remote file system raises errors of its own.
        raise RemoteError(unreadable(url, error)) from error


def _not_found_error(url: Url, cause: BaseException | None) -> DataError:
    """Return the true reason of a FileNotFoundError: fsspec raises it for any failure over http."""
    if cause is not None and url.address.startswith(("http://", "https://")):
        import asyncio

        import aiohttp

        if isinstance(cause, aiohttp.ClientResponseError) and cause.status != 404:
            kind = DataError if 400 <= cause.status < 500 else RemoteError
            return kind(
                f"{url}: cannot be read: the server returned {cause.status} "
                f"{printable(cause.message)}"
            )
        if isinstance(cause, (aiohttp.ClientConnectionError, asyncio.TimeoutError)):
            reason = reason_of(cause) if isinstance(cause, Exception) else ""
            return RemoteError(
                f"{url}: host {urlsplit(str(url)).netloc} cannot be reached ({reason}; no "
                "network?); check the address, or give a local file"
            )
    return DataError(f"{url}: no such file")


@dataclass(slots=True)
class Budget:
    """The number of bytes that may still be read."""

    left: int

    @property
    def spent(self) -> bool:
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
        raise DataError(_not_regular(file, kind))
    return os.fdopen(descriptor, "rb")


def special_file(file: Path) -> str | None:
    """Return the message that `file` is not a regular file; None if it is, or on an error."""
    try:
        kind = kind_of(file.stat().st_mode)
    except OSError:
        return None
    return _not_regular(file, kind) if kind else None


def _not_regular(file: Path, kind: str) -> str:
    return f"{file}: is {kind}, not a file; give a regular file"


@contextmanager
def open_text(file: File, options: ReadOptions) -> Iterator[Content]:
    """Open a text file; raises DataError if its first bytes are those of another format."""
    with _open_bytes(file, options.limits) as stream:
        head = stream.read(_SNIFFED_BYTES)
        if head.startswith(_UTF16_MARKS) or b"\0\0" in (head[:4:2], head[1:4:2]):
            raise DataError(f"{file}: is UTF-16; save it as UTF-8")
        for start, what in _NO_TEXT.items():
            if head.startswith(start):
                raise DataError(f"{file}: is {what}")
        if b"\r" in head and b"\n" not in head and len(head) > head.index(b"\r") + 1:
            raise DataError(f"{file}: has CR line endings; save it with LF line endings")
        yield Content(file, stream, options.budget, head.removeprefix(_UTF8_MARK))


@contextmanager
def open_seekable(file: File, limits: ReadLimits) -> Iterator[Any]:
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
def _open_bytes(file: File, limits: ReadLimits) -> Iterator[IO[bytes]]:
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
    limits: ReadLimits
    num_bytes: int = 0

    def read(self, size: int = -1) -> bytes:
        data = self.stream.read(size)
        self.num_bytes += len(data)
        check_expansion(self.file, self.num_bytes, self.packed.tell(), self.limits)
        return data


def check_expansion(file: File, num_bytes: int, packed_bytes: int, limits: ReadLimits) -> None:
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
        return io.BufferedReader(_RemoteStream(file.open, file.limits), PACED_BYTES)
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
        return iter(self.read)

    def count(self) -> int:
        return len(self.read)

    def select(self, kept: range) -> Chunk:
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
    limits: ReadLimits = field(default_factory=ReadLimits)
