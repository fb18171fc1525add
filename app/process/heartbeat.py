"""What a rank tells the process that started it, and that it does not outlive that process.

A line a word, over a pipe: neither the run's disk nor a clock that is set comes between them.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from app.process.files import open_no_follow

PIPE_VARIABLE = "LOFT_HEARTBEAT"
"""hands a rank its end of the pipe"""
PARENT_VARIABLE = "LOFT_PARENT"
"""hands a child the process that it is not to outlive"""
BEAT, ENDED, LOST, PORT_TAKEN = "beat", "ended", "lost", "port"
"""it works; it waits for nobody any more; another rank is gone; the port of the run is not free"""
STACKS_FILE = "stacks-rank-{}.txt"
"""in a run's folder: where each thread of a rank stood when it was found to hang"""
PR_SET_PDEATHSIG = 1

_pipe: int | None = None
_num_beats = 0
_step: int | None = None
_waits_for_thread = False
_stacks: IO[str] | None = None
_has_launcher = False


def live_with_parent() -> None:
    """Be killed when the process that started this one is, however that ends."""
    global _has_launcher
    _has_launcher = has_launcher()
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it has ended in the meantime
        os._exit(128 + signal.SIGKILL)


def has_launcher() -> bool:
    """Say whether a process of this program has started this one.

    It has named itself; what a shell or a grandparent left in the environment names another.
    """
    return _has_launcher or os.environ.get(PARENT_VARIABLE) == str(os.getppid())


def is_watched() -> bool:
    """Say whether a process watches over this one."""
    return PIPE_VARIABLE in os.environ and has_launcher()


def begin_to_beat(folder: Path, rank: int) -> None:
    """Let the watching process have the stacks of this one in run `folder` when it wants them."""
    global _stacks
    if _stacks is not None:
        return
    file = _stacks = open_no_follow(folder / STACKS_FILE.format(rank), "a", encoding="utf-8")
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)


def beat(step: int) -> None:
    """Say that this rank works, after `step` optimizer steps."""
    global _num_beats, _step
    _num_beats, _step = _num_beats + 1, step
    tell(f"{BEAT} {_num_beats} {step}")


def beat_again() -> None:
    """Say that this rank still works since its last beat, which may be long ago in a save.

    It is no beat that counts: ranks differ in how much they write. Before the first beat nothing is
    said, nor in a thread beside the training, which may hang nonetheless, unless that waits for it.
    """
    is_of_training = _waits_for_thread or threading.current_thread() is threading.main_thread()
    if _step is not None and is_of_training:
        tell(f"{BEAT} {_num_beats} {_step}")


@contextlib.contextmanager
def waiting_for_thread() -> Iterator[None]:
    """Let another thread beat again for the one that trains, which waits for it in here."""
    global _waits_for_thread
    _waits_for_thread = True
    try:
        yield
    finally:
        _waits_for_thread = False


def tell(words: str) -> bool:
    """Send one line to the watching process; says whether there is one that will read it."""
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
