"""The kinds of errors that end a run, and the exit code of each."""

from __future__ import annotations

import difflib
import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass

from common.redaction import redact
from common.text import printable

LOST_CONNECTION = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe", re.I)
"""torch's messages after a peer has ended"""
TAKEN_PORT = re.compile(r"EADDRINUSE|address already in use", re.I)
DEAD_WORKER = re.compile(r"DataLoader worker .*(killed by signal|exited unexpectedly)", re.S)
_BROKEN_DEVICE = re.compile(
    r"CUDA error: (?!device-side assert)|cuDNN error|CUBLAS_STATUS"
    r"|DefaultCPUAllocator|cannot allocate memory",
    re.I,
)
"""torch's messages if a GPU, its driver or memory fails; a device-side assert is a data or code
error"""

_MAX_PROBLEM = 2000
"""maximum length of a problem's text; of a longer one the beginning and the end are printed"""

MAX_PROBLEMS = 20
"""lines of the problems of a data set, the last of which counts the rest"""

DONE, USER_ERROR, ENVIRONMENT_ERROR, TRAINING_FAULT = 0, 2, 3, 4
INTERRUPTED, TERMINATED = 130, 143


class UserError(ValueError):
    """Input that the user can correct: one or several problems, each with location and fix."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        listed = [problems] if isinstance(problems, str) else problems
        self.problems = [_shortened(printable(redact(problem))) for problem in listed]
        super().__init__("\n".join(self.problems))


def _shortened(problem: str) -> str:
    if len(problem) <= _MAX_PROBLEM:
        return problem
    return f"{problem[: _MAX_PROBLEM // 2]} ... {problem[-_MAX_PROBLEM // 4 :]}"


class DataError(ValueError):
    """What is wrong with the data: all problems of one phase, a line each."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        problems = [problems] if isinstance(problems, str) else problems
        self.problems = [printable(redact(problem)) for problem in problems]
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[DataError], tuple[list[str]]]:
        return type(self), (self.problems,)


class RemoteError(DataError):
    """A server could not be reached, was too slow or disconnected; the data is not at fault."""


class DiskError(DataError):
    """The disk of the cache is full; the data is not at fault."""


class DeviceError(RuntimeError):
    """The GPUs of this machine cannot be used: one or several problems, each with its fix."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


class TrainingFault(RuntimeError):
    """Training failed: a nonfinite loss, or a saved adapter that cannot be reloaded."""


class Interrupted(SystemExit):
    """A signal ended the run; `message` says what was saved."""

    def __init__(self, signum: int, message: str) -> None:
        self.signum, self.message = signum, message
        super().__init__(128 + signum)

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.signum).name}: {self.message}"


class Problems:
    """Collect problems: at most MAX_PROBLEMS lines, the last of which counts the rest."""

    def __init__(self) -> None:
        self._kept: list[str] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, problem: str) -> None:
        """Keep `problem`, or only count it if there are MAX_PROBLEMS already."""
        self._count += 1
        if len(self._kept) < MAX_PROBLEMS:
            self._kept.append(problem)

    def lines(self) -> list[str]:
        if self._count <= MAX_PROBLEMS:
            return list(self._kept)
        hidden = self._count - MAX_PROBLEMS + 1
        return [*self._kept[:-1], f"... and {hidden:,} more like these"]

    def raise_if_any(self) -> None:
        """Raise DataError if there is a problem."""
        if self._count:
            raise DataError(self.lines())


@dataclass(frozen=True, slots=True)
class Origin:
    """The place of a row in its file.

    `line` is the row's first line, counted from 1; the row's number in parquet files and in JSON
    arrays on one line.
    """

    file: str
    line: int

    def __str__(self) -> str:
        return f"{printable(self.file)}:{self.line}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?` for the known name nearest to `name`, or an empty string."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    longer = [candidate for candidate in by_lower if candidate.startswith(f"{name.lower()}_")]
    close = longer or difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return f"; did you mean {by_lower[close[0]]}?" if close else ""


def exit_code(error: BaseException) -> int:
    """Return the exit code for `error`, from its type and, for torch's errors, its message."""
    if isinstance(error, SystemExit):
        return _code_of_exit(error)
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, TrainingFault):  # its message may quote names that match the patterns
        return TRAINING_FAULT
    if isinstance(error, (RemoteError, DiskError, DeviceError)):
        return ENVIRONMENT_ERROR
    if isinstance(error, (UserError, DataError)):
        return USER_ERROR
    out_of_memory = type(error).__name__ == "OutOfMemoryError"  # torch's, without importing torch
    if isinstance(error, (OSError, ImportError, MemoryError)) or out_of_memory:
        return ENVIRONMENT_ERROR
    # torch raises a plain RuntimeError for all of these.
    messages = (LOST_CONNECTION, TAKEN_PORT, DEAD_WORKER, _BROKEN_DEVICE)
    if isinstance(error, RuntimeError) and any(text.search(str(error)) for text in messages):
        return ENVIRONMENT_ERROR
    return TRAINING_FAULT


def _code_of_exit(error: SystemExit) -> int:
    # Lightning turns SIGTERM into a subclass of SystemExit, and Ctrl-C into its context.
    if type(error).__name__ == "SIGTERMException":
        return TERMINATED
    if isinstance(error.__context__, KeyboardInterrupt):
        return INTERRUPTED
    if error.code is None:
        return DONE
    return error.code if isinstance(error.code, int) else TRAINING_FAULT
