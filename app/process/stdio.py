"""Standard output and error that a run outlives: a pipe that is closed, a disk that is full."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO

from data_modules import redact


class LastingFile(io.FileIO):
    """A file that takes whatever is written to it from the first failure on, and drops it."""

    def write(self, data: object) -> int:
        """Write `data`, or drop it; returns how many bytes are done with."""
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return memoryview(data).nbytes  # type: ignore[arg-type]


class CleanText(io.TextIOWrapper):
    """Text that is printed without the secrets in it, whoever prints: a library quotes URLs too."""

    def write(self, text: str) -> int:
        """Write `text`, redacted; returns its length."""
        super().write(redact(text))
        return len(text)


def keep_streams() -> None:
    """Let this process go on when nobody reads what it prints; call before anything is opened."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:  # closed, as by `>&-`: the next file that is opened would be printed into
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = _open(1, sys.stdout, by_line=os.isatty(1))
    sys.stderr = _open(2, sys.stderr, by_line=True)


def _open(descriptor: int, before: TextIO | None, *, by_line: bool) -> io.TextIOWrapper:
    if before is not None:
        before.flush()
    raw = LastingFile(descriptor, "w", closefd=False)
    return CleanText(
        io.BufferedWriter(raw),
        encoding=before.encoding if before is not None else "utf-8",
        errors="backslashreplace",
        line_buffering=by_line,
    )
