"""Wait for a remote file system no longer than the limits allow.

Decides when a server is too slow or too silent. Knows no addresses and never looks at rows.
"""

from __future__ import annotations

import io
import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import IO, Any, TypeVar
from urllib.parse import urlsplit

from data_modules.messages import DataError, RemoteError, printable, reason_of, unreadable
from data_modules.source.limits import Limits, too_many

BLOCK_BYTES = 1 << 20
"""bytes over which the rate of a server is counted"""
_WHAT_TO_DO = "try again later, download the file and give its path, or raise the limit"
Answer = TypeVar("Answer")
REMOTE_MARKS = (
    "ETag",
    "etag",
    "md5Hash",
    "sha256",
    "LastModified",
    "last_modified",
    "updated",
    "mtime",
    "created",
    "blob_id",
    "last_commit",
)


@dataclass(frozen=True, slots=True)
class Url:
    """Name a file that fsspec opens; as text it is shown without password and query."""

    address: str
    limits: Limits = field(default_factory=Limits, compare=False)

    @property
    def name(self) -> str:
        """Return the last part of its path."""
        return PurePosixPath(str(self)).name

    @property
    def suffix(self) -> str:
        """Return the suffix of its name."""
        return PurePosixPath(self.name).suffix

    def open(self) -> IO[bytes]:
        """Open it; raises what its file system raises."""
        import fsspec

        stream: IO[bytes] = fsspec.open(self.address, "rb", **self.options()).open()
        return stream

    def options(self) -> dict[str, Any]:
        """Return what its file system is made with."""
        if not self.address.startswith(("http://", "https://")):
            return {}
        import aiohttp

        seconds = self.limits.remote_seconds
        # Without it a request ends after five minutes, however much comes.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=seconds, sock_read=seconds)
        return {"block_size": BLOCK_BYTES, "client_kwargs": {"timeout": timeout}}

    def __str__(self) -> str:
        return re.sub(r"(?<=://)[^/@]*@", "", self.address).split("?")[0].split("#")[0]


def answer_within(limits: Limits, ask: Callable[[], Answer]) -> Answer:
    """Return what `ask` returns; raises TimeoutError after `limits.remote_seconds`."""
    seconds = limits.remote_seconds
    try:
        return _wait(seconds, ask)
    except queue.Empty as error:
        raise TimeoutError(
            f"no answer within {seconds:g} seconds, which is data.limits.remote_seconds; "
            f"{_WHAT_TO_DO}"
        ) from error


def _wait(seconds: float, ask: Callable[[], Answer]) -> Answer:
    """Return what `ask` returns, or raise what it raises; queue.Empty after `seconds`.

    It runs in a thread of its own, which is left alone when it takes too long: a call of a library
    that waits for the network cannot be interrupted.
    """
    outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((ask(), None))
        except BaseException as error:  # noqa: BLE001  raised by the thread that waits
            outcome.put((None, error))

    threading.Thread(target=run, name="remote", daemon=True).start()
    answer, error = outcome.get(timeout=seconds)
    if error is not None:
        raise error
    return answer


class RemoteStream(io.RawIOBase):
    """Read a remote file; raises TimeoutError where its server is too slow, OSError beyond a limit.

    Each MiB may take `remote_seconds` and what it takes at `remote_bytes_per_second`.
    """

    def __init__(self, open_it: Callable[[], IO[bytes]], limits: Limits) -> None:
        super().__init__()
        self._limits = limits
        self._stream = answer_within(limits, open_it)
        self._position = self._num_bytes = self._block = 0
        self._waited = 0.0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Tell whether the remote side can jump."""
        return self._stream.seekable()

    def tell(self) -> int:
        """Return the place of the next byte."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to another place; nothing is fetched yet."""
        self._position = self._stream.seek(offset, whence)
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fetch up to `len(buffer)` bytes."""
        limits = self._limits
        allowed = limits.remote_seconds + BLOCK_BYTES / limits.remote_bytes_per_second
        size = min(len(buffer), BLOCK_BYTES)
        started = time.monotonic()
        try:
            data = _wait(max(0.0, allowed - self._waited), lambda: self._stream.read(size))
        except queue.Empty as error:
            raise TimeoutError(
                f"{self._block:,} bytes came in {allowed:.0f} seconds; "
                f"data.limits.remote_bytes_per_second is {limits.remote_bytes_per_second:,}; "
                f"{_WHAT_TO_DO}"
            ) from error
        buffer[: len(data)] = data
        self._waited += time.monotonic() - started
        self._count(len(data))
        return len(data)

    def _count(self, num_bytes: int) -> None:
        self._position += num_bytes
        self._num_bytes += num_bytes
        self._block += num_bytes
        if self._block >= BLOCK_BYTES:
            self._block, self._waited = 0, 0.0
        limit = self._limits.remote_bytes
        if self._num_bytes > limit:
            raise OSError(too_many("sends", f"more than {limit:,} bytes", "remote_bytes", limit))

    def close(self) -> None:
        """Close the remote file."""
        if not self.closed:
            self._stream.close()
        super().close()


def fresh_info(file_system: Any, place: str) -> dict[str, Any]:
    """Return the present facts of a remote file, not those remembered."""
    file_system.invalidate_cache(place)
    info: dict[str, Any] = file_system.info(place)
    return info


def query_remote(url: Url, ask: Callable[[Any, str], Any]) -> Any:
    """Query the file system of an address; raises DataError with its answer."""
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
        raise DataError(
            f"{url}: needs a package that is not installed ({reason_of(error)}); "
            "pip install 'loft[remote]'"
        ) from error
    except FileNotFoundError as error:
        raise _why_not_found(url, error.__cause__) from error
    except DataError:
        raise
    except Exception as error:
        # Each remote file system has errors of its own.
        raise RemoteError(unreadable(url, error)) from error


def _why_not_found(url: Url, cause: BaseException | None) -> DataError:
    """Word what fsspec calls a missing file: it does so whatever goes wrong over http."""
    if cause is not None and url.address.startswith(("http://", "https://")):
        import asyncio

        import aiohttp

        if isinstance(cause, aiohttp.ClientResponseError) and cause.status != 404:
            kind = DataError if 400 <= cause.status < 500 else RemoteError
            return kind(
                f"{url}: cannot be read: the server says {cause.status} {printable(cause.message)}"
            )
        if isinstance(cause, (aiohttp.ClientConnectionError, asyncio.TimeoutError)):
            reason = reason_of(cause) if isinstance(cause, Exception) else ""
            return RemoteError(
                f"{url}: host {urlsplit(str(url)).netloc} cannot be reached ({reason}; no "
                "network?); check the address, or give a local file"
            )
    return DataError(f"{url}: no such file")


def list_urls(folder: Url, file_system: Any, places: Sequence[str]) -> list[Url]:
    """Return the addresses of files that a remote folder or glob has, sorted."""
    return [Url(file_system.unstrip_protocol(place), folder.limits) for place in sorted(places)]
