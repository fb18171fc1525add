"""Standard output and error that may fail without ending the run: a closed pipe, a full disk."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO

from data_modules import redact


class LastingFile(io.FileIO):
    """A file that discards whatever is written to it after the first failure."""

    def write(self, data: object) -> int:
        """Write or discard `data`; returns the number of bytes consumed."""
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return memoryview(data).nbytes  # type: ignore[arg-type]


class CleanText(io.TextIOWrapper):
    """Text output without secrets, whoever prints: libraries quote URLs too."""

    def write(self, text: str) -> int:
        """Write `text`, redacted; returns its length."""
        super().write(redact(text))
        return len(text)


def keep_streams() -> None:
    """Keep this process running when its output is closed; call before any file is opened."""
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
