"""What a rank reports to the process that started it, one line a message over a pipe.

Neither through the run's folder, since a disk may hang, nor by the time of day, which may be set.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from app.process.files import open_no_follow
from app.process.launch import PIPE_VARIABLE, read_launch

BEAT, ENDED, LOST, PORT_TAKEN = "beat", "ended", "lost", "port"
"""a step is done; the training loop has ended; another rank is lost; the run's port is not free"""
STACKS_FILE = "stacks-rank-{}.txt"
"""in a run's folder: the stack of each thread of a rank that hangs"""

_pipe: int | None = None
_num_beats = 0
_num_signs = 0
"""beats, and refreshed liveness"""
_step: int | None = None
_thread: threading.Thread | None = None
"""that trains: under Ray not the main one"""
_waits_for_thread = False
_stacks: IO[str] | None = None


def is_watched() -> bool:
    """Say whether a supervisor watches this process."""
    return PIPE_VARIABLE in os.environ and read_launch().has_parent


def start_heartbeat(folder: Path, rank: int) -> None:
    """Dump the stacks of all threads into run `folder` whenever the supervisor sends SIGUSR2."""
    global _stacks
    if _stacks is not None:
        return
    file = _stacks = open_no_follow(folder / STACKS_FILE.format(rank), "a", encoding="utf-8")
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)


def beat(step: int) -> None:
    """Report progress: `step` optimizer steps are done."""
    global _num_beats, _num_signs, _step, _thread
    _thread = threading.current_thread()
    _num_beats, _num_signs, _step = _num_beats + 1, _num_signs + 1, step
    tell(f"{BEAT} {_num_beats} {step}")


def beat_again() -> None:
    """Refresh liveness without advancing the counter, as during a long save.

    The counter tells which rank made fewer steps, and ranks differ in how much they write. Silent
    before the first step, and in a thread beside the training unless the training waits for it.
    """
    global _num_signs
    is_of_training = _waits_for_thread or threading.current_thread() is _thread
    if _step is not None and is_of_training:
        _num_signs += 1
        tell(f"{BEAT} {_num_beats} {_step}")


def progress() -> tuple[int, int, int | None]:
    """Return the beats, all signs of life, and the optimizer steps done, None before the first."""
    return _num_beats, _num_signs, _step


@contextlib.contextmanager
def waiting_for_thread() -> Iterator[None]:
    """Let another thread call `beat_again` for the training thread, which waits for it in here."""
    global _waits_for_thread
    _waits_for_thread = True
    try:
        yield
    finally:
        _waits_for_thread = False


def tell(words: str) -> bool:
    """Send one line to the supervisor; returns whether there is one that will read it."""
    global _pipe
    if not is_watched():
        return False
    if _pipe is None:
        _pipe = int(os.environ[PIPE_VARIABLE])
        os.set_blocking(_pipe, False)
        os.set_inheritable(_pipe, False)
    try:
        os.write(_pipe, f"{' '.join(words.split())}\n".encode())
    except BlockingIOError:  # it reads again in a moment, and a beat is soon followed by another
        return True
    except OSError:
        return False
    return True
