"""What a person sees when something goes wrong, and the exit code that a script sees."""

from __future__ import annotations

import difflib
import os
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_PROBLEMS = 20
TRACEBACK_VARIABLE = "LOFT_TRACEBACK"

DONE, USER_ERROR, ENVIRONMENT_ERROR, TRAINING_FAULT = 0, 2, 3, 4
INTERRUPTED, TERMINATED = 130, 143


class UserError(ValueError):
    """Input that a person can mend: one or several problems, each with where and the fix."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class TrainingFault(RuntimeError):
    """Training went bad: a loss that is not finite, a saved adapter that does not read back."""


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
    if isinstance(error, UserError) or (isinstance(error, ValueError) and _raised_here(error)):
        return USER_ERROR
    out_of_memory = type(error).__name__ == "OutOfMemoryError"  # torch's, without importing torch
    if isinstance(error, (OSError, ImportError, MemoryError)) or out_of_memory:
        return ENVIRONMENT_ERROR
    return TRAINING_FAULT


def report(error: BaseException) -> int:
    """Print `error` as one message on stderr, and return its exit code."""
    code = exit_code(error)
    if os.environ.get(TRACEBACK_VARIABLE) == "1":
        traceback.print_exception(error)
    elif code == INTERRUPTED:
        print("\ninterrupted", file=sys.stderr)
    elif not isinstance(error, SystemExit):
        print(_message(error, code), file=sys.stderr)
    return code


def _message(error: BaseException, code: int) -> str:
    problems = getattr(error, "problems", None) or [str(error) or type(error).__name__]
    if code == USER_ERROR:
        return format_problems(problems)
    kind = {ENVIRONMENT_ERROR: "the environment", TRAINING_FAULT: "training stopped"}[code]
    where = "" if isinstance(error, TrainingFault) else f"{type(error).__name__}: "
    hint = f"{TRACEBACK_VARIABLE}=1 before the command shows where it happened"
    return f"error ({kind}): {where}{problems[0]}\n  {hint}"


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


def _raised_here(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return False
    origin = Path(frames[-1].filename).resolve()
    return any(origin.is_relative_to(ROOT / room) for room in ("app", "data_modules"))
