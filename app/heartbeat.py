"""What a rank tells the process that started it, and that it does not outlive that process.

A line a word, over a pipe: neither the run's disk nor a clock that is set comes between them.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
from pathlib import Path
from typing import IO

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
_stacks: IO[str] | None = None


def live_with_parent() -> None:
    """Be killed when the process that started this one is, however that ends."""
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it has ended in the meantime
        os._exit(128 + signal.SIGKILL)


def is_watched() -> bool:
    """Say whether a process watches over this one."""
    return PIPE_VARIABLE in os.environ


def begin_to_beat(folder: Path, rank: int) -> None:
    """Let the watching process have the stacks of this one in run `folder` when it wants them."""
    global _stacks
    if _stacks is not None:
        return
    file = _stacks = (folder / STACKS_FILE.format(rank)).open("a", encoding="utf-8")
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)


def beat(step: int) -> None:
    """Say that this rank works, after `step` optimizer steps."""
    global _num_beats
    _num_beats += 1
    tell(f"{BEAT} {_num_beats} {step}")


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
