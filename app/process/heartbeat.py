"""Messages from a rank to the supervisor that started it, one per line, over a pipe.

A pipe, not a file in the run's folder, since a disk may hang; no wall-clock times, since the clock
may be set.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from app.process.launch import PIPE_VARIABLE, read_launch
from common.files import open_no_follow

BEAT, ENDED, PEER_LOST, PORT_TAKEN = "beat", "ended", "lost", "port"
"""messages: a step is done; the training loop has ended; another rank is lost; the run's port is in
use"""
STACKS_FILE = "stacks-rank-{}.txt"
"""file in a run's folder with the stacks of all threads of a hanging rank"""
_PAUSE_FACTOR = 10
"""multiple of a rank's longest pause so far that a new pause may take before it counts as a hang"""
_MAX_POLL_SECONDS = 1.0
"""upper bound of the time counted between two polls: the polling process may have been stopped"""

_pipe: int | None = None
_num_beats = 0
_num_signs = 0
"""signs of life: beats and liveness refreshes"""
_step: int | None = None
_thread: threading.Thread | None = None
"""training thread; under Ray not the main thread"""
_waits_for_thread = False
"""whether the training thread waits for another thread, whose liveness then counts as its own"""
_stacks: IO[str] | None = None


@dataclass(slots=True)
class Pauses:
    """The time without a sign of life from a rank, measured by whoever watches it."""

    seconds: float = 0.0
    """current pause, in seconds"""
    longest: float = 0.0
    """longest completed pause, in seconds"""

    def poll(self, elapsed: float, *, is_alive: bool) -> None:
        """Add the seconds since the last poll to the pause, or end it; call twice a second."""
        if is_alive:
            self.longest, self.seconds = max(self.longest, self.seconds), 0.0
        else:
            self.seconds += min(elapsed, _MAX_POLL_SECONDS)

    def is_hang(self, min_seconds: float) -> bool:
        """Whether the pause exceeds `min_seconds` and _PAUSE_FACTOR times the longest one."""
        return self.seconds > max(min_seconds, _PAUSE_FACTOR * self.longest)


def is_watched() -> bool:
    """Return whether a supervisor watches this process."""
    return PIPE_VARIABLE in os.environ and read_launch().has_parent


def start_heartbeat(folder: Path, rank: int) -> None:
    """Dump the stacks of all threads into run `folder` whenever the supervisor sends SIGUSR2."""
    global _stacks
    if _stacks is not None:
        return
    file = _stacks = open_no_follow(folder / STACKS_FILE.format(rank), "a", encoding="utf-8")
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)


def send_heartbeat(step: int) -> None:
    """Report progress: `step` optimizer steps are done."""
    global _num_beats, _num_signs, _step, _thread
    _thread = threading.current_thread()
    _num_beats, _num_signs, _step = _num_beats + 1, _num_signs + 1, step
    send_to_supervisor(f"{BEAT} {_num_beats} {step}")


def refresh_liveness() -> None:
    """Report that the training thread is alive, as during a long save, without counting one.

    The number of beats shows which rank has done fewer steps, and ranks differ in how much they
    save. Ignored before the first step, and in any other thread unless the training thread waits
    for it.
    """
    global _num_signs
    is_training_thread = _waits_for_thread or threading.current_thread() is _thread
    if _step is not None and is_training_thread:
        _num_signs += 1
        send_to_supervisor(f"{BEAT} {_num_beats} {_step}")


def progress() -> tuple[int, int, int | None]:
    """Return the number of beats, of all signs of life, and of optimizer steps (None before)."""
    return _num_beats, _num_signs, _step


def format_progress(step: int | None) -> str:
    """Return where in the run something happened, for a message about a rank."""
    return f"after step {step}" if step else "before its first step"


@contextlib.contextmanager
def waiting_for_thread() -> Iterator[None]:
    """Count `refresh_liveness` in any thread, while the training thread waits for one."""
    global _waits_for_thread
    _waits_for_thread = True
    try:
        yield
    finally:
        _waits_for_thread = False


def send_to_supervisor(message: str) -> bool:
    """Send one line to the supervisor; return whether a supervisor will read it."""
    global _pipe
    if not is_watched():
        return False
    if _pipe is None:
        _pipe = int(os.environ[PIPE_VARIABLE])
        os.set_blocking(_pipe, False)
        os.set_inheritable(_pipe, False)
    try:
        os.write(_pipe, f"{' '.join(message.split())}\n".encode())
    except BlockingIOError:  # the pipe is full; another follows soon
        return True
    except OSError:
        return False
    return True
