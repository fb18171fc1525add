"""Open one file, on disk or remote, decompressed and only as far as a budget allows.

Decides what may be opened under which name. Never looks at rows.
"""

from __future__ import annotations

import gzip
import io
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from data_modules.redaction import redact
from data_modules.types import DataError

CHUNK_BYTES = 1 << 20
_SNIFFED_BYTES = 1 << 16
_UTF8_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_COMPRESSIONS = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd"}
_COMPRESSION_NAMES = {".gz": "gzip-compressed", ".zst": "zstd-compressed"}
_NO_TEXT = {
    b"PAR1": "a parquet file; name it .parquet",
    b"ARROW1": "an arrow file; name it .arrow",
    b"PK\x03\x04": "a zip archive; unpack it",
}


@dataclass(slots=True)
class Budget:
    """Count the bytes that may still be read; what lies beyond them is not looked at."""

    left: int

    @property
    def spent(self) -> bool:
        """Tell whether nothing more may be read."""
        return self.left <= 0


@dataclass(frozen=True, slots=True)
class Url:
    """Name a file that fsspec opens; as text it is shown without password and query."""

    address: str

    @property
    def name(self) -> str:
        """Return the last part of its path."""
        return PurePosixPath(str(self)).name

    @property
    def suffix(self) -> str:
        """Return the suffix of its name."""
        return PurePosixPath(self.name).suffix

    def open(self, mode: str = "rb") -> IO[bytes]:
        """Open it; raises what its file system raises."""
        import fsspec

        stream: IO[bytes] = fsspec.open(self.address, mode).open()
        return stream

    def __str__(self) -> str:
        return re.sub(r"(?<=://)[^/@]*@", "", self.address).split("?")[0].split("#")[0]


File = Path | Url


@dataclass(slots=True)
class Content:
    """Read what the budget allows; `cut` says that there is more than that."""

    file: File
    stream: IO[bytes]
    budget: Budget | None
    head: bytes = b""
    cut: bool = False

    def read(self) -> bytes:
        """Return the next CHUNK_BYTES, or those that are left; b"" at the end."""
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
        """Return all bytes that are left."""
        return b"".join(iter(self.read, b""))


def suffix_of(name: str) -> str:
    """Return the suffix of a file's name that says its format: that before .gz or .zst."""
    return PurePosixPath(_without_compression(name.lower())).suffix


def stem_of(name: str) -> str:
    """Return a file's name without the suffixes that say its format."""
    bare = _without_compression(name)
    return bare[: len(bare) - len(suffix_of(name))]


def reason_of(error: Exception) -> str:
    """Return in one line what an error of a library says."""
    strerror = error.strerror if isinstance(error, OSError) else None
    said = strerror or next(iter(str(error).splitlines()), "") or type(error).__name__
    # A library may quote an address, with the password or the token in it.
    return redact(said)


@contextmanager
def open_text(file: File, budget: Budget | None) -> Iterator[Content]:
    """Open a file of text; raises DataError where its first bytes are none."""
    with open_bytes(file) as stream:
        head = stream.read(_SNIFFED_BYTES)
        if head.startswith(_UTF16_MARKS) or b"\0\0" in (head[:4:2], head[1:4:2]):
            raise DataError(f"{file}: is UTF-16; save it as UTF-8")
        for start, what in _NO_TEXT.items():
            if head.startswith(start):
                raise DataError(f"{file}: is {what}")
        if b"\r" in head and b"\n" not in head and len(head) > head.index(b"\r") + 1:
            raise DataError(f"{file}: its lines end in CR alone; save it with LF at line ends")
        yield Content(file, stream, budget, head.removeprefix(_UTF8_MARK))


@contextmanager
def open_seekable(file: File) -> Iterator[Any]:
    """Open a file for the readers of pyarrow, which jump in it."""
    import pyarrow

    with open_bytes(file) as stream:
        if file.suffix.lower() in _COMPRESSIONS:
            with tempfile.TemporaryFile() as unpacked:
                shutil.copyfileobj(stream, unpacked, CHUNK_BYTES)
                unpacked.seek(0)
                yield unpacked
        elif isinstance(file, Path):
            # Not memory-mapped: a file cut while it is read would then end the process.
            with pyarrow.OSFile(str(file)) as plain:
                yield plain
        else:
            yield stream


@contextmanager
def open_bytes(file: File) -> Iterator[IO[bytes]]:
    """Open a file, decompressed as its name says; raises DataError where the bytes say else."""
    with _open(file) as raw:
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
                yield cast(IO[bytes], unzipped)
        elif found == ".zst":
            import pyarrow

            with pyarrow.CompressedInputStream(raw, "zstd") as stream:
                yield stream
        else:
            yield raw


def _open(file: File) -> io.BufferedReader:
    try:
        stream: Any = file.open("rb")
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {reason_of(error)}") from error
    return stream if isinstance(stream, io.BufferedReader) else io.BufferedReader(stream)


def _without_compression(name: str) -> str:
    for suffix in _COMPRESSIONS:
        if name.lower().endswith(suffix):
            return name[: -len(suffix)]
    return name
