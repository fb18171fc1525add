"""How an error is reported: one message for all ranks, and the exit code that a script sees."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from app.process.errors import (
    DEAD_WORKER,
    ENVIRONMENT_ERROR,
    INTERRUPTED,
    LOST_CONNECTION,
    TAKEN_PORT,
    TERMINATED,
    TRAINING_FAULT,
    USER_ERROR,
    DeviceError,
    Interrupted,
    TrainingFault,
    exit_code,
)
from app.process.heartbeat import LOST, PORT_TAKEN, send_to_supervisor
from app.process.launch import is_first_here, is_first_rank, run_dir
from app.process.peers import watched_peers
from app.process.signals import signal_received
from data_modules import RemoteError, printable, redact

MAX_PROBLEMS = 20
TRACEBACK_VARIABLE = "LOFT_TRACEBACK"
REASON_FILE = "error.txt"
"""in a run's folder: why the run stopped"""
ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""torchrun's: the file whose message it shows where this rank fails"""
REASON_BEGINS = b"error"


def report(error: BaseException) -> int:
    """Print `error` as one message on stderr, once for all ranks, and return its exit code."""
    code = exit_code(error)
    lost = _name_lost(error)
    if not lost and signal_received() == signal.SIGTERM and LOST_CONNECTION.search(str(error)):
        code = TERMINATED  # Lightning's handler talks to the other ranks; they may have ended
    if os.environ.get(TRACEBACK_VARIABLE) == "1":
        traceback.print_exception(error)
    elif isinstance(error, Interrupted):
        if is_first_rank():
            print(f"\n{error}", file=sys.stderr)
    elif code == INTERRUPTED:
        if is_first_rank():
            print("\ninterrupted", file=sys.stderr)
    elif code != TERMINATED and not isinstance(error, SystemExit):
        message = lost or _message(error, code)
        if not lost and (peers := watched_peers()) is not None:
            peers.publish_failure(message.splitlines()[0])
        write_error_file(message)
        if lost:
            keep_reason(message)
        if is_first_here() if lost else _claim_message(error, message):
            print(message, file=sys.stderr)
    return code


def _name_lost(error: BaseException) -> str | None:
    """Return which rank this one has lost, in words; None where the error is another one."""
    peers = watched_peers()
    is_of_torch = isinstance(error, RuntimeError) and not isinstance(
        error, (TrainingFault, DeviceError)
    )
    if peers is None or not is_of_torch or not LOST_CONNECTION.search(str(error)):
        return None
    # Of torch's message only what happened: the rest is advice of its own.
    happened = str(error).partition("] ")[2].partition(". This is typically")[0] or str(error)
    explained = peers.explain_lost_connection(printable(redact(happened)))
    return None if explained is None else f"error (the environment): {explained}"


def write_error_file(message: str) -> None:
    """Leave the message for torchrun, in the form of torch's `ErrorHandler`."""
    if not (file := os.environ.get(ERROR_FILE_VARIABLE)):
        return
    extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError):
        Path(file).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))


def keep_reason(message: str) -> None:
    """Leave the message in the run's folder, unless another rank was first."""
    if (folder := run_dir()) is not None:
        with contextlib.suppress(OSError):
            _write_reason(folder, message)


def _write_reason(folder: Path, message: str) -> None:
    reason = folder / REASON_FILE
    with reason.open("x", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"{message}\n")


def _claim_message(error: BaseException, message: str) -> bool:
    """Claim the run's one message by writing it into the run's folder.

    Not rank 0 by rule: what fails on one rank is reported there, and the others are then ended. The
    error that another rank reports about the lost peer is none of its own.
    """
    folder = run_dir()
    if TAKEN_PORT.search(str(error)) and send_to_supervisor(PORT_TAKEN):
        return False  # the supervisor tries another port
    is_lost = not isinstance(error, TrainingFault) and LOST_CONNECTION.search(str(error))
    if is_lost and send_to_supervisor(f"{LOST} {message}"):
        return False  # the supervisor knows which rank ended first
    if folder is None:  # a machine without its GPUs may not be that of rank 0
        return is_first_rank() or isinstance(error, DeviceError)
    if not is_first_rank() and LOST_CONNECTION.search(str(error)):
        return False
    try:
        _write_reason(folder, message)
    except FileExistsError:
        return False
    except OSError:  # the message may be about this very disk
        return is_first_rank()
    return True


def is_reason(file: Path) -> bool:
    """Tell whether `report` wrote a file of this name, by how it begins."""
    if file.is_symlink() or not file.is_file():
        return False
    with file.open("rb") as stream:
        return stream.read(len(REASON_BEGINS)) == REASON_BEGINS


def _message(error: BaseException, code: int) -> str:
    problems = getattr(error, "problems", None) or [str(error) or type(error).__name__]
    if code == USER_ERROR:
        return format_problems([printable(redact(problem)) for problem in problems])
    first = printable(redact(problems[0]), keep="\n")
    kind = {ENVIRONMENT_ERROR: "the environment", TRAINING_FAULT: "training stopped"}[code]
    if isinstance(error, (RemoteError, DeviceError)):
        return f"error ({kind}): " + "\n  ".join(printable(redact(one)) for one in problems)
    where = "" if isinstance(error, TrainingFault) else f"{type(error).__name__}: "
    hint = f"{TRACEBACK_VARIABLE}=1 before the command shows where it happened"
    if TAKEN_PORT.search(problems[0]):
        port = os.environ.get("MASTER_PORT", "of the rendezvous")
        hint = (
            f"port {port} is in use on the machine of rank 0; type another one for all ranks: "
            "export MASTER_PORT=N before srun, --rdzv-endpoint=HOST:N for torchrun"
        )
    if DEAD_WORKER.search(problems[0]):
        hint = (
            "a loader's worker is often killed for lack of memory, or of room in /dev/shm; type a "
            "smaller data.num_workers (0 makes batches in the training process)"
        )
    return f"error ({kind}): {where}{first}\n  {hint}"


def format_problems(problems: list[str]) -> str:
    """Format one problem as a line, several as a numbered list of at most MAX_PROBLEMS."""
    if len(problems) == 1:
        return f"error: {problems[0]}"
    lines = [f"error: {len(problems)} problems"]
    lines += [f"  {i}. {problem}" for i, problem in enumerate(problems[:MAX_PROBLEMS], start=1)]
    if len(problems) > MAX_PROBLEMS:
        lines.append(f"  ... and {len(problems) - MAX_PROBLEMS} more")
    return "\n".join(lines)
