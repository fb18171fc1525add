"""status.json in a run's folder: what the run is doing, for schedulers, dashboards and scripts.

Whoever knows of a change writes it: the first rank, the rank that reports an error, the supervisor.
Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from common.errors import DONE
from common.files import write_atomically
from common.untrusted import read_json_object

STATUS_FILE = "status.json"
STARTING, TRAINING, EVALUATING, FINISHED = "starting", "training", "evaluating", "finished"
STOPPED, FAILED = "stopped", "failed"
"""states of a run that has ended before its last step: by a signal, or by an error"""
RUNNING, NO_NEWS = 75, 76
"""exit codes of `loft status` for a run that has not ended"""
_FIELDS = {
    "step": None,
    "steps": None,
    "epoch": None,
    "loss": None,
    "val_loss": None,
    "tokens_per_second": None,
    "seconds_per_step": None,
    "hours_left": None,
    "checkpoint": None,
    "exit_code": None,
    "message": None,
    "late": None,
}
"""what is known at the start of a run, besides its state"""
_lock = threading.Lock()
"""held during a change: the thread that watches the other ranks writes, too"""


def begin_status(folder: Path, step: int) -> None:
    """Write the status of a training run that starts after `step` optimizer steps."""
    _write(folder, _FIELDS | {"state": STARTING, "step": step})


def restart_status(folder: Path, step: int) -> None:
    """Begin anew if `folder` is that of a training run: its ranks are started again."""
    if _read(folder):
        begin_status(folder, step)


def update_status(folder: Path, **changed: Any) -> None:
    """Change the status of a run, unless an error or a signal has ended it."""
    with _lock:
        if (status := _read(folder)) and status.get("state") not in (STOPPED, FAILED):
            _write(folder, status | changed)


def end_status(folder: Path, state: str, exit_code: int, message: str | None = None) -> None:
    """Record how a run ended; nothing if `folder` is not that of a training run."""
    ending = {"state": state, "exit_code": exit_code, "message": message, "hours_left": None}
    with _lock:
        if status := _read(folder):
            _write(folder, status | ending)


def confirm_finished(folder: Path) -> None:
    """Record that a run has finished which was killed before it could say so."""
    if _read(folder).get("state") in (STARTING, TRAINING, EVALUATING, STOPPED):
        end_status(folder, FINISHED, DONE)


def _read(folder: Path) -> dict[str, Any]:
    return read_json_object(folder / STATUS_FILE)[0]


def _write(folder: Path, status: dict[str, Any]) -> None:
    status |= {"written": time.time(), "host": socket.gethostname(), "pid": os.getpid()}
    with contextlib.suppress(OSError):  # a run does not end for it; the disk may be full
        write_atomically(folder / STATUS_FILE, json.dumps(status, indent=2) + "\n")
