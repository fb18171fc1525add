"""What a person sees when something goes wrong, and the exit code that a script sees."""

from __future__ import annotations

import difflib
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

from app.process.heartbeat import LOST, PORT_TAKEN, tell
from app.process.launch import is_first_rank, run_dir
from data_modules import DataError, RemoteError, printable, redact

ROOT = Path(__file__).resolve().parents[2]
MAX_PROBLEMS = 20
TRACEBACK_VARIABLE = "LOFT_TRACEBACK"
REASON_FILE = "error.txt"
"""in a run's folder: why the run stopped"""
REASON_BEGINS = b"error"
LOST_CONNECTION = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe", re.I)
"""how torch words that another rank has left"""
TAKEN_PORT = re.compile(r"EADDRINUSE|address already in use", re.I)
DEAD_WORKER = re.compile(r"DataLoader worker .*(killed by signal|exited unexpectedly)", re.S)
"""how torch words that a process which makes batches is gone"""
BROKEN_DEVICE = re.compile(
    r"CUDA error: (?!device-side assert)|cuDNN error|CUBLAS_STATUS"
    r"|DefaultCPUAllocator|cannot allocate memory",
    re.I,
)
"""how torch words that a GPU, its driver or the memory fails; an assert on it is of data or code"""

DONE, USER_ERROR, ENVIRONMENT_ERROR, TRAINING_FAULT = 0, 2, 3, 4
INTERRUPTED, TERMINATED = 130, 143


class UserError(ValueError):
    """Input that a person can mend: one or several problems, each with where and the fix."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        listed = [problems] if isinstance(problems, str) else problems
        self.problems = [printable(redact(problem)) for problem in listed]
        super().__init__("\n".join(self.problems))


class TrainingFault(RuntimeError):
    """Training went bad: a loss that is not finite, a saved adapter that does not read back."""


class Interrupted(SystemExit):
    """A signal ends the run; `message` says what was saved of it."""

    def __init__(self, signum: int, message: str) -> None:
        self.signum, self.message = signum, message
        super().__init__(128 + signum)

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.signum).name}: {self.message}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Word a guess at what was meant: `; did you mean X?`, or nothing."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return f"; did you mean {by_lower[close[0]]}?" if close else ""


def exit_code(error: BaseException) -> int:
    """Say which exit code stands for `error`."""
    if isinstance(error, SystemExit):
        return _code_of_exit(error)
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, TrainingFault):  # whatever the rows are called that it names
        return TRAINING_FAULT
    if _is_of_sigterm(error):
        return TERMINATED
    if isinstance(error, RemoteError):
        return ENVIRONMENT_ERROR
    if _is_of_the_user(error):
        return USER_ERROR
    out_of_memory = type(error).__name__ == "OutOfMemoryError"  # torch's, without importing torch
    if isinstance(error, (OSError, ImportError, MemoryError)) or out_of_memory:
        return ENVIRONMENT_ERROR
    if isinstance(error, RuntimeError) and _words_of_the_environment(error):
        return ENVIRONMENT_ERROR
    return TRAINING_FAULT


def report(error: BaseException) -> int:
    """Print `error` as one message on stderr, once for all ranks, and return its exit code."""
    code = exit_code(error)
    if os.environ.get(TRACEBACK_VARIABLE) == "1":
        traceback.print_exception(error)
    elif isinstance(error, Interrupted):
        if is_first_rank():
            print(f"\n{error}", file=sys.stderr)
    elif code == INTERRUPTED:
        if is_first_rank():
            print("\ninterrupted", file=sys.stderr)
    elif code != TERMINATED and not isinstance(error, SystemExit):
        message = _message(error, code)
        if _speaks_first(error, message):
            print(message, file=sys.stderr)
    return code


def _speaks_first(error: BaseException, message: str) -> bool:
    """Claim the run's one message by writing it into the run's folder.

    Not rank 0 by rule: what fails on one rank alone is told there, and the others are then ended.
    That the connection to such a rank was lost is only its echo.
    """
    folder = run_dir()
    if TAKEN_PORT.search(str(error)) and tell(PORT_TAKEN):
        return False  # who started the ranks tries another
    is_lost = not isinstance(error, TrainingFault) and LOST_CONNECTION.search(str(error))
    if is_lost and tell(f"{LOST} {message}"):
        return False  # who started the ranks knows which of them was the first to go
    if folder is None:
        return is_first_rank()
    if not is_first_rank() and LOST_CONNECTION.search(str(error)):
        return False
    try:
        reason = folder / REASON_FILE
        with reason.open("x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{message}\n")
    except FileExistsError:
        return False
    except OSError:  # the disk may be what the message is about
        return is_first_rank()
    return True


def is_reason(file: Path) -> bool:
    """Say whether a file of this name was written here, by how it begins."""
    if file.is_symlink() or not file.is_file():
        return False
    with file.open("rb") as stream:
        return stream.read(len(REASON_BEGINS)) == REASON_BEGINS


def _message(error: BaseException, code: int) -> str:
    problems = getattr(error, "problems", None) or [str(error) or type(error).__name__]
    if code == USER_ERROR:
        return format_problems([printable(redact(problem)) for problem in problems])
    said = printable(redact(problems[0]), keep="\n")
    kind = {ENVIRONMENT_ERROR: "the environment", TRAINING_FAULT: "training stopped"}[code]
    if isinstance(error, RemoteError):
        return f"error ({kind}): " + "\n  ".join(printable(redact(one)) for one in problems)
    where = "" if isinstance(error, TrainingFault) else f"{type(error).__name__}: "
    hint = f"{TRACEBACK_VARIABLE}=1 before the command shows where it happened"
    if DEAD_WORKER.search(problems[0]):
        hint = (
            "a loader's worker is often killed for lack of memory, or of room in /dev/shm; type a "
            "smaller data.num_workers (0 makes batches in the training process)"
        )
    return f"error ({kind}): {where}{said}\n  {hint}"


def format_problems(problems: list[str]) -> str:
    """Lay out one problem as a line, several as a numbered list of at most MAX_PROBLEMS."""
    if len(problems) == 1:
        return f"error: {problems[0]}"
    lines = [f"error: {len(problems)} problems"]
    lines += [f"  {i}. {problem}" for i, problem in enumerate(problems[:MAX_PROBLEMS], start=1)]
    if len(problems) > MAX_PROBLEMS:
        lines.append(f"  ... and {len(problems) - MAX_PROBLEMS} more")
    return "\n".join(lines)


def _code_of_exit(error: SystemExit) -> int:
    # Lightning turns both signals into SystemExit, by a subclass and by the context.
    if type(error).__name__ == "SIGTERMException":
        return TERMINATED
    if isinstance(error.__context__, KeyboardInterrupt):
        return INTERRUPTED
    if error.code is None:
        return DONE
    return error.code if isinstance(error.code, int) else TRAINING_FAULT


def _words_of_the_environment(error: RuntimeError) -> bool:
    text = str(error)
    of_environment = (LOST_CONNECTION, TAKEN_PORT, DEAD_WORKER, BROKEN_DEVICE)
    return any(words.search(text) for words in of_environment)


def _is_of_sigterm(error: BaseException) -> bool:
    # Lightning talks to the other ranks within its signal handler; they may be gone already.
    return any(f.name == "_sigterm_notifier_fn" for f in traceback.extract_tb(error.__traceback__))


def _is_of_the_user(error: BaseException) -> bool:
    """Tell input that we refuse from a ValueError that a bug of ours has met."""
    if isinstance(error, (UserError, DataError)):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    if not isinstance(error, ValueError) or not frames:
        return False
    origin, line = Path(frames[-1].filename).resolve(), frames[-1].line or ""
    is_ours = any(origin.is_relative_to(ROOT / room) for room in ("app", "data_modules"))
    return is_ours and line.startswith("raise ")
