"""What SIGTERM, SIGINT, SIGHUP and SLURM's SIGUSR1 do: noted in a step, acted on behind it.

The handler only notes; outside of the training loop it also ends the program where it stands. A
thread hears of signals apart from it, since a handler waits for as long as a library computes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from dataclasses import dataclass
from types import FrameType

from app.errors import Interrupted
from app.launch import is_child

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
# A terminal and a launcher from outside may send the same signal at one moment. A rank of our own
# gets the terminal's, and behind it the one that its supervisor passes on, which looks every 0.1 s.
SAME_PRESS = 0.1
"""seconds within which signals are one"""
SAME_PRESS_OF_A_RANK = 0.5
"""the same for a rank that this program's supervisor has started"""
LOOK_EVERY = 0.5
"""seconds between two looks at the time; a signal is seen when it comes"""
TIME_TO_LEAVE = 5.0
"""seconds that the program has to end where nothing is saved first"""


@dataclass(slots=True)
class _Heard:
    is_rank: bool
    """whether this program's supervisor has started this process"""
    signum: int | None = None
    """the first signal that came"""
    waits_for_step: bool = False
    """whether the training loop asks for it"""
    left_at: float | None = None
    """when the program was told to end where it stands, by the monotonic clock"""


_heard: _Heard | None = None


def hear_signals() -> None:
    """Handle the signals of this process from now on; called in its main thread."""
    global _heard
    if _heard is not None:
        return
    _heard = _Heard(is_rank=is_child())  # later it has told its own ranks
    heard_by_thread, told = socket.socketpair()
    told.setblocking(False)
    signal.set_wakeup_fd(told.detach(), warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(heard_by_thread, _heard), daemon=True).start()
    os.register_at_fork(after_in_child=_forget)
    take_handlers()


def take_handlers() -> None:
    """Handle the signals here again, where a library has put its own handlers."""
    if _heard is not None:
        for signum in HANDLED:
            if signal.getsignal(signum) != signal.SIG_IGN:  # as nohup wants it
                signal.signal(signum, _handle)


def wait_for_step(waits: bool) -> None:
    """Begin or cease to ask for signals between steps; Interrupted if one came in the meantime."""
    if _heard is None:
        return
    if not waits and _heard.signum is not None:
        _leave(_heard)
    _heard.waits_for_step = waits
    if not waits and _heard.signum is not None:  # it came between the two
        _leave(_heard)


def leave_soon() -> None:
    """Have this process ended in a few seconds if it does not end by itself: all is saved."""
    if _heard is not None:
        _heard.left_at = time.monotonic()


def signal_heard() -> int | None:
    """Return the first signal that came, None as long as there was none."""
    return None if _heard is None else _heard.signum


def _handle(signum: int, frame: FrameType | None) -> None:
    if _heard is None:
        return
    if _heard.signum is None:
        _heard.signum = signum
    if not _heard.waits_for_step and _heard.left_at is None:
        _leave(_heard)


def _leave(heard: _Heard) -> None:
    heard.left_at = time.monotonic()
    assert heard.signum is not None
    raise Interrupted(heard.signum, "outside of the training steps")


def _watch(signals: socket.socket, heard: _Heard) -> None:
    """Leave at once on a second signal, and in a few seconds on one outside of training."""
    first: float | None = None
    while True:
        left_at = heard.left_at or (None if heard.waits_for_step else first)
        if left_at is not None and time.monotonic() - left_at > TIME_TO_LEAVE:
            _leave_at_once(heard.signum or signal.SIGTERM, "did not end by itself")
        signals.settimeout(LOOK_EVERY)  # it may have to leave without a signal of its own
        try:
            numbers = set(signals.recv(64)) & set(HANDLED)
        except TimeoutError:
            continue
        if not numbers:
            continue
        if first is None:
            first = time.monotonic()
        elif time.monotonic() - first > (SAME_PRESS_OF_A_RANK if heard.is_rank else SAME_PRESS):
            _leave_at_once(min(numbers), "a second signal")


def _leave_at_once(signum: int, why: str) -> None:
    name = signal.Signals(signum).name
    with contextlib.suppress(OSError):
        os.write(2, f"{name}: left at once ({why})\n".encode())
    os._exit(128 + signum)


def _forget() -> None:
    """Leave signals to the process that forked this one, which ends it in time."""
    global _heard
    if _heard is None:
        return
    _heard = None
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for signum in HANDLED[1:]:
        signal.signal(signum, signal.SIG_IGN)
