"""Time-outs and minimum rates for remote files and the Hugging Face hub.

Decides when a server is too slow or silent for too long. Never reads rows.
"""

from __future__ import annotations

import importlib
import io
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePosixPath
from typing import IO, Any, TypeVar
from urllib.parse import urlsplit

from common.errors import DataError, RemoteError
from common.limited import LimitError, call_within
from common.text import printable, reason_of, unreadable
from data_modules.source.limits import Limits, too_many

BLOCK_BYTES = 1 << 20
"""bytes over which the rate of a server is measured"""
_FIX = "try again later, download the file and give its path, or raise the limit"
Answer = TypeVar("Answer")
PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "http": "aiohttp",
    "https": "aiohttp",
}
"""protocol -> package with its file system; the extra `remote` has them all"""
REMOTE_MARKS = (
    *("ETag", "etag", "md5Hash", "sha256", "LastModified", "last_modified", "updated", "mtime"),
    *("created", "blob_id", "last_commit"),
)


@dataclass(frozen=True, slots=True)
class Url:
    """The URL of a file for fsspec; its string has no password and no query."""

    address: str
    limits: Limits = field(default_factory=Limits, compare=False)

    @property
    def name(self) -> str:
        """The last part of its path."""
        return PurePosixPath(str(self)).name

    @property
    def suffix(self) -> str:
        """The suffix of its name."""
        return PurePosixPath(self.name).suffix

    def open(self) -> IO[bytes]:
        """Open it; raises what its file system raises."""
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
        return {"block_size": BLOCK_BYTES, "client_kwargs": {"timeout": timeout}}

    def __str__(self) -> str:
        return re.sub(r"(?<=://)[^/@]*@", "", self.address).split("?")[0].split("#")[0]


def _answer_within(limits: Limits, ask: Callable[[], Answer]) -> Answer:
    """Return what `ask` returns; raises TimeoutError after `limits.remote_seconds`."""
    seconds = limits.remote_seconds
    try:
        return call_within(seconds, ask)
    except LimitError as error:
        raise TimeoutError(
            f"no answer within {seconds:g} seconds (data.limits.remote_seconds); {_FIX}"
        ) from error


def _too_slow(num_bytes: int, seconds: float, limits: Limits) -> str:
    return (
        f"received {num_bytes:,} bytes in {seconds:.0f} seconds; "
        f"data.limits.remote_bytes_per_second is {limits.remote_bytes_per_second:,}; {_FIX}"
    )


class RemoteStream(io.RawIOBase):
    """A remote file; reading raises TimeoutError if the server is too slow, OSError beyond a limit.

    Each MiB may take `remote_seconds` plus its time at `remote_bytes_per_second`.
    """

    def __init__(self, opener: Callable[[], IO[bytes]], limits: Limits) -> None:
        super().__init__()
        self._limits = limits
        self._stream = _answer_within(limits, opener)
        self._position = self._num_bytes = self._block = 0
        self._waited = 0.0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return whether the server supports ranges."""
        return self._stream.seekable()

    def tell(self) -> int:
        """Return the position of the next byte."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position; nothing is downloaded yet."""
        self._position = self._stream.seek(offset, whence)
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Download up to `len(buffer)` bytes."""
        limits = self._limits
        allowed = limits.remote_seconds + BLOCK_BYTES / limits.remote_bytes_per_second
        size = min(len(buffer), BLOCK_BYTES)
        started = time.monotonic()
        try:
            data = call_within(max(0.0, allowed - self._waited), lambda: self._stream.read(size))
        except LimitError as error:
            raise TimeoutError(_too_slow(self._block, allowed, limits)) from error
        buffer[: len(data)] = data
        self._waited += time.monotonic() - started
        self._position += len(data)
        self._num_bytes += len(data)
        self._block += len(data)
        if self._block >= BLOCK_BYTES:
            self._block, self._waited = 0, 0.0
        if self._num_bytes > (most := limits.remote_bytes):
            raise OSError(too_many("sends", f"more than {most:,} bytes", "remote_bytes", most))
        return len(data)

    def close(self) -> None:
        """Close the remote file."""
        if not self.closed:
            self._stream.close()
        super().close()


def fresh_info(file_system: Any, place: str) -> dict[str, Any]:
    """Return the info of a remote file, bypassing the cache."""
    file_system.invalidate_cache(place)
    info: dict[str, Any] = file_system.info(place)
    return info


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
        return _answer_within(url.limits, answer)
    except ImportError as error:
        package = PACKAGES.get(url.address.partition("://")[0].rpartition("::")[2])
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


class HubPace:
    """Abort downloads from the Hugging Face hub that are too slow or silent, before any retries.

    Does not cover models downloaded by `hf_xet`, which has its own limit for silence but none for a
    low rate. Data sets are downloaded without it.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._silent = 0.0
        self._client: Any = None

    def limit(self) -> None:
        """Make huggingface_hub send its requests through this limiter from now on."""
        import huggingface_hub

        self._client = huggingface_hub.get_session()
        huggingface_hub.set_client_factory(self._build_client)

    def _build_client(self) -> Any:
        """Return a client like the library's own, with timed responses."""
        default = self._client
        # httpx or httpx2, depending on the version of huggingface_hub.
        library = importlib.import_module(type(default).__module__.partition(".")[0])
        client = type(default)(event_hooks=default.event_hooks, follow_redirects=True, timeout=None)
        send = client.send

        class Timed(library.SyncByteStream):  # type: ignore[name-defined]
            def __init__(self, stream: Any, url: Url, pace: HubPace) -> None:
                self._stream, self._url, self._pace = stream, url, pace

            def __iter__(self) -> Iterator[bytes]:
                return self._pace.timed(self._stream, self._url, library.TimeoutException)

            def close(self) -> None:
                self._stream.close()

        def send_timed(request: Any, *, stream: bool = False, **options: Any) -> Any:
            url, started = Url(str(request.url)), time.monotonic()
            try:
                answer = partial(send, request, stream=True, **options)
                response = _answer_within(self._limits, answer)
            except (library.TimeoutException, TimeoutError) as error:
                self._count_silence(url, started, error)
                raise
            self._silent = 0.0
            response.stream = Timed(response.stream, url, self)
            if not stream:
                response.read()
            return response

        client.send = send_timed
        return client

    def timed(self, stream: Any, url: Url, timeout: type[Exception]) -> Iterator[bytes]:
        """Yield the received bytes; raises RemoteError if they are too slow."""
        limits = self._limits
        allowed = limits.remote_seconds + BLOCK_BYTES / limits.remote_bytes_per_second
        block, waited, started = 0, 0.0, time.monotonic()
        try:
            for data in stream:
                self._silent = 0.0
                block, waited = block + len(data), waited + time.monotonic() - started
                if waited > allowed:
                    raise RemoteError(f"{url}: {_too_slow(block, waited, limits)}")
                if block >= BLOCK_BYTES:
                    block, waited = 0, 0.0
                yield data
                started = time.monotonic()  # excludes the reader's own time
        except timeout as error:
            self._count_silence(url, started, error)
            raise

    def _count_silence(self, url: Url, started: float, error: Exception) -> None:
        self._silent += time.monotonic() - started
        seconds = self._limits.remote_seconds
        if self._silent >= seconds:
            raise RemoteError(
                f"{url}: no answer within {self._silent:.1f} seconds; data.limits.remote_seconds "
                f"is {seconds:g}; {_FIX}"
            ) from error


def list_urls(folder: Url, file_system: Any, places: Sequence[str]) -> list[Url]:
    """Return the URLs of the files in a remote folder or glob, sorted."""
    return [Url(file_system.unstrip_protocol(place), folder.limits) for place in sorted(places)]
