"""What SIGTERM, SIGINT, SIGHUP and SLURM's SIGUSR1 do: noted in a step, acted on behind it.

The handler only notes; outside of the training loop it also ends the program where it stands, as
it does where the loop waits for data that does not come. A thread hears of signals apart from it,
since a handler waits for as long as a library computes. Where nothing is saved first, the program
is gone LEAVES_WITHIN seconds after a signal.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from app.process.errors import Interrupted
from app.process.launch import is_child

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
WAKES = signal.SIGURG
"""has the main thread look again, out of a system call that it waits in; ignored by default"""
# A terminal and a launcher from outside may send the same signal at one moment. A rank of our own
# gets the terminal's, and behind it the one that its supervisor passes on, which looks every 0.1 s.
SAME_PRESS = 0.1
"""seconds within which signals are one"""
SAME_PRESS_OF_A_RANK = 0.5
"""the same for a rank that this program's supervisor has started"""
LOOK_EVERY = 0.25
"""seconds between two looks at the time; a signal is seen when it comes"""
TIME_TO_LEAVE = 2.5
"""seconds that the program has to end by itself where nothing is saved first"""
TIME_FOR_WORKERS = 1.0
"""of these, seconds that the processes which work for it have"""
TIME_FOR_DATA = 1.5
"""seconds that a training step which has to end first is given to get its data"""
LEAVES_WITHIN = TIME_FOR_DATA + TIME_TO_LEAVE
"""seconds from a signal to the end of the program where nothing is saved"""


@dataclass(slots=True)
class _Heard:
    is_rank: bool
    """whether this program's supervisor has started this process"""
    signum: int | None = None
    """the first signal that came"""
    waits_for_step: bool = False
    """whether the training loop asks for it"""
    reads_since: float | None = None
    """since when the training loop waits for data, by the monotonic clock; None if it does not"""
    is_overdue: bool = False
    """whether the data has not come in the time that it is given after a signal"""
    left_at: float | None = None
    """when the program was told to end where it stands, by the monotonic clock"""


_received: _Heard | None = None


class DataStalled(Interrupted):
    """A signal ends the run while its training loop waits for data."""


def install_signal_handlers() -> None:
    """Handle the signals of this process from now on; called in its main thread."""
    global _received
    if _received is not None:
        return
    _received = _Heard(is_rank=is_child())  # later it has told its own ranks
    heard_by_thread, told = socket.socketpair()
    told.setblocking(False)
    signal.set_wakeup_fd(told.detach(), warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(heard_by_thread, _received), daemon=True).start()
    os.register_at_fork(after_in_child=_forget)
    take_handlers()


def take_handlers() -> None:
    """Handle the signals here again, where a library has put its own handlers."""
    if _received is not None:
        for signum in HANDLED:
            if signal.getsignal(signum) != signal.SIG_IGN:  # as nohup wants it
                signal.signal(signum, _handle)
        signal.signal(WAKES, _handle_stall)


def wait_for_step(waits: bool) -> None:
    """Begin or cease to ask for signals between steps; Interrupted if one came in the meantime."""
    if _received is None:
        return
    if not waits and _received.signum is not None:
        _leave(_received)
    _received.waits_for_step = waits
    if not waits and _received.signum is not None:  # it came between the two
        _leave(_received)


def wait_for_data(waits: bool) -> None:
    """Note that the training loop begins or ceases to wait for data."""
    if _received is not None:
        _received.reads_since = time.monotonic() if waits else None


def take_time() -> None:
    """Let this process save before it ends, however long that takes; `exit_after_grace` follows."""
    if _received is not None:
        _received.left_at = None


def exit_after_grace() -> None:
    """Have this process ended in a few seconds if it does not end by itself: all is saved."""
    if _received is not None:
        _received.left_at = time.monotonic()


def end_process(code: int) -> NoReturn:
    """End this process with `code`; after a signal without taking apart what it has imported.

    That takes seconds, in which no thread runs any more that could cut it short.
    """
    if _received is None or _received.signum is None:
        sys.exit(code)
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def signal_received() -> int | None:
    """Return the first signal that came, None as long as there was none."""
    return None if _received is None else _received.signum


def _handle(signum: int, frame: FrameType | None) -> None:
    if _received is None:
        return
    if _received.signum is None:
        _received.signum = signum
    if not _received.waits_for_step and _received.left_at is None:
        _leave(_received)


def _handle_stall(signum: int, frame: FrameType | None) -> None:
    if _received is None or not _received.is_overdue or _received.left_at is not None:
        return
    if _received.reads_since is not None:
        _received.left_at = time.monotonic()
        raise DataStalled(
            _received.signum or signal.SIGTERM, "the data of the next step did not come"
        )


def _leave(heard: _Heard) -> None:
    heard.left_at = time.monotonic()
    assert heard.signum is not None
    raise Interrupted(heard.signum, "outside of the training steps")


def _watch(signals: socket.socket, heard: _Heard) -> None:
    """Leave at once on a second signal, and in a few seconds on one outside of training."""
    first: float | None = None
    overdue_at: float | None = None
    number, main = int(signal.SIGTERM), threading.main_thread().ident
    assert main is not None
    while True:
        if heard.reads_since is None:  # it came after all
            overdue_at, heard.is_overdue = None, False
        left_at = heard.left_at or overdue_at or (None if heard.waits_for_step else first)
        if left_at is not None and time.monotonic() - left_at > TIME_FOR_WORKERS:
            _kill_workers()
        if left_at is not None and time.monotonic() - left_at > TIME_TO_LEAVE:
            _leave_at_once(heard.signum or number, "did not end by itself")
        if overdue_at is None and _stalls(heard, first):
            overdue_at, heard.is_overdue = time.monotonic(), True
            signal.pthread_kill(main, WAKES)
        signals.settimeout(LOOK_EVERY)  # it may have to leave without a signal of its own
        try:
            numbers = set(signals.recv(64)) & set(HANDLED)
        except TimeoutError:
            continue
        if not numbers:
            continue
        if first is None:
            first, number = time.monotonic(), min(numbers)
        elif time.monotonic() - first > (SAME_PRESS_OF_A_RANK if heard.is_rank else SAME_PRESS):
            _leave_at_once(min(numbers), "a second signal")


def _stalls(heard: _Heard, first: float | None) -> bool:
    """Tell whether the data of a step has not come in its time after the signal."""
    since = heard.reads_since
    if first is None or since is None or not heard.waits_for_step:
        return False
    return time.monotonic() - max(first, since) > TIME_FOR_DATA


def _kill_workers() -> None:
    """End the processes that work for this one, which waits for them before it ends."""
    for worker in multiprocessing.active_children():
        worker.kill()


def _leave_at_once(signum: int, why: str) -> None:
    _kill_workers()
    name = signal.Signals(signum).name
    with contextlib.suppress(OSError):
        os.write(2, f"{name}: left at once ({why})\n".encode())
    os._exit(128 + signum)


def _forget() -> None:
    """Leave signals to the process that forked this one, which ends it in time."""
    global _received
    if _received is None:
        return
    _received = None
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGTERM, WAKES):
        signal.signal(signum, signal.SIG_DFL)
    for signum in HANDLED[1:]:
        signal.signal(signum, signal.SIG_IGN)
