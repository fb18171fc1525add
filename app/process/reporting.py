"""How an error is reported: one message for all ranks, and an exit code for scripts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from app.process.heartbeat import PEER_LOST, PORT_TAKEN, send_to_supervisor
from app.process.launch import is_first_on_machine, is_first_rank, run_dir
from app.process.peers import watched_peers
from app.process.signals import signal_received
from app.process.status import FAILED, STOPPED, end_status
from common.errors import (
    DEAD_WORKER,
    ENVIRONMENT_ERROR,
    INTERRUPTED,
    LOST_CONNECTION,
    MAX_PROBLEMS,
    TAKEN_PORT,
    TERMINATED,
    TRAINING_FAULT,
    USER_ERROR,
    DeviceError,
    DiskError,
    Interrupted,
    RemoteError,
    TrainingFault,
    exit_code,
)
from common.redaction import redact
from common.text import printable

TRACEBACK_VARIABLE = "LOFT_TRACEBACK"
REASON_FILE = "error.txt"
"""file in a run's folder with the reason why the run stopped"""
_ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""variable of torchrun: the file whose message it prints if this rank fails"""
_REASON_PREFIX = b"error"
"""first bytes of every REASON_FILE"""


def report(error: BaseException) -> int:
    """Print `error` as one message on stderr, once for all ranks, and return its exit code."""
    code = exit_code(error)
    lost = _explain_lost_connection(error)
    if not lost and signal_received() == signal.SIGTERM and LOST_CONNECTION.search(str(error)):
        code = TERMINATED  # Lightning's handler talks to the other ranks, which may have ended
    if os.environ.get(TRACEBACK_VARIABLE) == "1":
        traceback.print_exception(error)
    elif isinstance(error, Interrupted):
        if is_first_rank():
            print(f"\n{error}", file=sys.stderr)
            if (folder := run_dir()) is not None:
                end_status(folder, STOPPED, code, str(error))
    elif code == INTERRUPTED:
        if is_first_rank():
            print("\ninterrupted", file=sys.stderr)
    elif code != TERMINATED and not isinstance(error, SystemExit):
        message = lost or _message(error, code)
        if not lost and (peers := watched_peers()) is not None:
            peers.publish_failure(message.splitlines()[0])
        write_error_file(message)
        if lost:
            save_reason(message)
        if is_first_on_machine() if lost else _claim_message(error, message, code):
            print(message, file=sys.stderr)
    return code


def _explain_lost_connection(error: BaseException) -> str | None:
    """Return a message that names the rank which was lost; None for any other error."""
    peers = watched_peers()
    is_from_torch = isinstance(error, RuntimeError) and not isinstance(
        error, (TrainingFault, DeviceError)
    )
    if peers is None or not is_from_torch or not LOST_CONNECTION.search(str(error)):
        return None
    # Only the part of torch's message that says what happened: the rest is its advice.
    happened = str(error).partition("] ")[2].partition(". This is typically")[0] or str(error)
    explained = peers.explain_lost_connection(printable(redact(happened)))
    return None if explained is None else f"error (the environment): {explained}"


def write_error_file(message: str) -> None:
    """Write the message for torchrun, in the format of torch's `ErrorHandler`."""
    if not (file := os.environ.get(_ERROR_FILE_VARIABLE)):
        return
    extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError):
        Path(file).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))


def save_reason(message: str) -> None:
    """Save why another rank was lost in the run's folder, unless a rank has saved a reason."""
    if (folder := run_dir()) is not None:
        with contextlib.suppress(OSError):
            _write_reason(folder, message, ENVIRONMENT_ERROR)


def _write_reason(folder: Path, message: str, code: int) -> None:
    reason = folder / REASON_FILE
    with reason.open("x", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"{message}\n")
    end_status(folder, FAILED, code, message)


def _claim_message(error: BaseException, message: str, code: int) -> bool:
    """Return whether this rank prints the run's one message, after saving it in the run's folder.

    Any rank may do so: an error on one rank is reported there, and the other ranks are then ended.
    Their errors about the lost peer are not printed.
    """
    folder = run_dir()
    if TAKEN_PORT.search(str(error)) and send_to_supervisor(PORT_TAKEN):
        return False  # the supervisor tries another port
    is_lost = not isinstance(error, TrainingFault) and LOST_CONNECTION.search(str(error))
    if is_lost and send_to_supervisor(f"{PEER_LOST} {message}"):
        return False  # the supervisor knows which rank ended first
    if folder is None:  # the machine whose GPUs fail may not be that of rank 0
        return is_first_rank() or isinstance(error, DeviceError)
    if not is_first_rank() and LOST_CONNECTION.search(str(error)):
        return False
    try:
        _write_reason(folder, message, code)
    except FileExistsError:
        return False
    except OSError:  # the message may be about this disk
        return is_first_rank()
    return True


def is_reason(file: Path) -> bool:
    """Return whether a file of this name was written by `report`, by its first bytes."""
    if file.is_symlink() or not file.is_file():
        return False
    with file.open("rb") as stream:
        return stream.read(len(_REASON_PREFIX)) == _REASON_PREFIX


def _message(error: BaseException, code: int) -> str:
    problems = getattr(error, "problems", None) or [str(error) or type(error).__name__]
    if code == USER_ERROR:
        return format_problems([printable(redact(problem)) for problem in problems])
    first = printable(redact(problems[0]), keep="\n")
    kind = {ENVIRONMENT_ERROR: "the environment", TRAINING_FAULT: "training stopped"}[code]
    if isinstance(error, (RemoteError, DiskError, DeviceError)):
        return f"error ({kind}): " + "\n  ".join(printable(redact(text)) for text in problems)
    error_type = "" if isinstance(error, TrainingFault) else f"{type(error).__name__}: "
    hint = f"type {TRACEBACK_VARIABLE}=1 before the command to print the traceback"
    if TAKEN_PORT.search(problems[0]):
        port = os.environ.get("MASTER_PORT", "of the rendezvous")
        hint = (
            f"port {port} is in use on the machine of rank 0; choose another one for all ranks: "
            "export MASTER_PORT=N before srun, --rdzv-endpoint=HOST:N for torchrun"
        )
    if DEAD_WORKER.search(problems[0]):
        hint = (
            "DataLoader workers are often killed for lack of memory, or of space in /dev/shm; type "
            "a smaller data.num_workers (0 builds batches in the training process)"
        )
    return f"error ({kind}): {error_type}{first}\n  {hint}"


def format_problems(problems: list[str]) -> str:
    """Format one problem as a line, or several as a numbered list of at most MAX_PROBLEMS."""
    if len(problems) == 1:
        return f"error: {problems[0]}"
    lines = [f"error: {len(problems)} problems"]
    lines += [f"  {i}. {problem}" for i, problem in enumerate(problems[:MAX_PROBLEMS], start=1)]
    if len(problems) > MAX_PROBLEMS:
        lines.append(f"  ... and {len(problems) - MAX_PROBLEMS} more")
    return "\n".join(lines)
