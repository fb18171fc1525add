"""Wait for a remote file system no longer than the limits allow.

Decides when a server is too slow or too silent. Knows no addresses and never looks at rows.
"""

from __future__ import annotations

import io
import queue
import threading
import time
from collections.abc import Callable
from typing import IO, Any, TypeVar

from data_modules.source.limits import Limits, too_many

BLOCK_BYTES = 1 << 20
"""bytes over which the rate of a server is counted"""
_WHAT_TO_DO = "try again later, download the file and give its path, or raise the limit"

Answer = TypeVar("Answer")


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
