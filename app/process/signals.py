"""What SIGTERM, SIGINT, SIGHUP and SLURM's SIGUSR1 do: recorded in a step, acted on after it.

The handler only records the signal; outside of the training loop, or where the loop waits for data
that does not come, it also ends the program at once. A thread receives signals as well, since a
handler waits for as long as a library computes. Where nothing is saved first, the program has ended
EXITS_WITHIN seconds after a signal.
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
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from app.process.errors import Interrupted
from app.process.launch import is_child

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
WAKES = signal.SIGURG
"""interrupts a system call that the main thread waits in; ignored by default"""
# A terminal and an external launcher may send the same signal at one moment. A rank of our own gets
# the terminal's, and after it the one that its supervisor passes on, which polls every 0.1 s.
SAME_PRESS = 0.1
"""seconds within which two signals count as one"""
SAME_PRESS_OF_A_RANK = 0.5
"""the same for a rank that this program's supervisor has started"""
POLL_SECONDS = 0.25
"""between two checks of the deadlines; a signal is received when it comes"""
EXIT_SECONDS = 2.5
"""that the program has to end by itself where nothing is saved first"""
WORKER_SECONDS = 1.0
"""of these, before its worker processes are killed"""
DATA_SECONDS = 1.5
"""that a training step which has to end first may wait for its data"""
EXITS_WITHIN = DATA_SECONDS + EXIT_SECONDS
"""seconds from a signal to the end of the program where nothing is saved"""


@dataclass(slots=True)
class _State:
    is_rank: bool
    """whether this program's supervisor has started this process"""
    signum: int | None = None
    """the first signal received"""
    waits_for_step: bool = False
    """whether the training loop polls for signals between steps"""
    reads_since: float | None = None
    """since when the training loop waits for data, or measures; None if it does neither"""
    reads: str = ""
    """what has not ended where a signal ends the wait, in words"""
    is_overdue: bool = False
    """whether the data has not come within DATA_SECONDS of a signal"""
    exits_since: float | None = None
    """when the program began to end, by the monotonic clock"""


_state: _State | None = None


class DataStalled(Interrupted):
    """A signal ends the run while its training loop waits for data, or measures."""


def install_signal_handlers() -> None:
    """Handle the signals of this process from now on; called in its main thread."""
    global _state
    if _state is not None:
        return
    _state = _State(is_rank=is_child())
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    signal.set_wakeup_fd(sender.detach(), warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(receiver, _state), daemon=True).start()
    os.register_at_fork(after_in_child=_forget)
    take_handlers()


def take_handlers() -> None:
    """Restore our handlers after a library has installed its own."""
    if _state is not None:
        for signum in HANDLED:
            if signal.getsignal(signum) != signal.SIG_IGN:  # as nohup wants it
                signal.signal(signum, _handle)
        signal.signal(WAKES, _handle_stall)


def wait_for_step(waits: bool) -> None:
    """Start or stop polling for signals between steps; Interrupted if one came in the meantime."""
    if _state is None:
        return
    if not waits and _state.signum is not None:
        _raise_interrupted(_state)
    _state.waits_for_step = waits
    if not waits and _state.signum is not None:  # it came between the two
        _raise_interrupted(_state)


def wait_for_data(waits: bool) -> None:
    """Record that the training loop starts or stops waiting for data."""
    _wait(waits, "the data of the next step did not come")


@contextlib.contextmanager
def measuring() -> Iterator[None]:
    """Let a signal end within DATA_SECONDS what a step measures, as it ends a wait for data."""
    _wait(True, "what was being measured is measured again")
    try:
        yield
    finally:
        _wait(False, "")


def _wait(waits: bool, what: str) -> None:
    if _state is not None:
        _state.reads = what
        _state.reads_since = time.monotonic() if waits else None


def take_time() -> None:
    """Suspend the deadline while this process saves; `exit_after_grace` follows."""
    if _state is not None:
        _state.exits_since = None


def exit_after_grace() -> None:
    """Kill this process in EXIT_SECONDS if it has not ended by then: all is saved."""
    if _state is not None:
        _state.exits_since = time.monotonic()


def end_process(code: int) -> NoReturn:
    """End this process with `code`; after a signal, and as a rank, without finalizing Python.

    That takes seconds, in which no thread runs any more that could enforce the deadline. Under the
    threads of a process group it was seen to abort (torch 2.13, gloo: "terminate called without an
    active exception"), by which the exit code of a run that was done, or had refused, is lost.
    """
    if _state is None or (_state.signum is None and not _has_process_group()):
        sys.exit(code)
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _has_process_group() -> bool:
    distributed = sys.modules.get("torch.distributed")  # imported by what has made a group
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def wait_to_be_ended(seconds: float) -> None:
    """Wait for SIGTERM or SIGINT, for at most `seconds`; what follows chooses the exit code."""
    ended = threading.Event()
    signal.set_wakeup_fd(-1)  # a second signal would end the program with a code of its own
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda signum, frame: ended.set())
    ended.wait(seconds)


def signal_received() -> int | None:
    """Return the first signal received, None while there was none."""
    return None if _state is None else _state.signum


def _handle(signum: int, frame: FrameType | None) -> None:
    if _state is None:
        return
    if _state.signum is None:
        _state.signum = signum
    if not _state.waits_for_step and _state.exits_since is None:
        _raise_interrupted(_state)


def _handle_stall(signum: int, frame: FrameType | None) -> None:
    if _state is None or not _state.is_overdue or _state.exits_since is not None:
        return
    if _state.reads_since is not None:
        _state.exits_since = time.monotonic()
        raise DataStalled(_state.signum or signal.SIGTERM, _state.reads)


def _raise_interrupted(state: _State) -> None:
    state.exits_since = time.monotonic()
    assert state.signum is not None
    raise Interrupted(state.signum, "not during a training step")


def _watch(receiver: socket.socket, state: _State) -> None:
    """Exit now on a second signal, and within EXIT_SECONDS on one outside of training."""
    first: float | None = None
    overdue_at: float | None = None
    number, main = int(signal.SIGTERM), threading.main_thread().ident
    assert main is not None
    while True:
        if state.reads_since is None:  # it came after all
            overdue_at, state.is_overdue = None, False
        exits_since = state.exits_since or overdue_at or (None if state.waits_for_step else first)
        if exits_since is not None and time.monotonic() - exits_since > WORKER_SECONDS:
            kill_workers()
        if exits_since is not None and time.monotonic() - exits_since > EXIT_SECONDS:
            _exit_now(state.signum or number, "did not end by itself")
        if overdue_at is None and _stalls(state, first):
            overdue_at, state.is_overdue = time.monotonic(), True
            signal.pthread_kill(main, WAKES)
        receiver.settimeout(POLL_SECONDS)  # a deadline may pass without a signal
        try:
            numbers = set(receiver.recv(64)) & set(HANDLED)
        except TimeoutError:
            continue
        if not numbers:
            continue
        if first is None:
            first, number = time.monotonic(), min(numbers)
            state.signum = state.signum or number  # before any handler that a library may have
        elif time.monotonic() - first > (SAME_PRESS_OF_A_RANK if state.is_rank else SAME_PRESS):
            _exit_now(min(numbers), "a second signal")


def _stalls(state: _State, first: float | None) -> bool:
    """Tell whether a step has waited DATA_SECONDS for its data after the signal."""
    since = state.reads_since
    if first is None or since is None or not state.waits_for_step:
        return False
    return time.monotonic() - max(first, since) > DATA_SECONDS


def kill_workers() -> None:
    """Kill the worker processes, which this one would wait for before it ends."""
    for worker in multiprocessing.active_children():
        worker.kill()


def _exit_now(signum: int, why: str) -> None:
    kill_workers()
    name = signal.Signals(signum).name
    with contextlib.suppress(OSError):
        os.write(2, f"{name}: exited at once ({why})\n".encode())
    os._exit(128 + signum)


def _forget() -> None:
    """Ignore signals in a forked process, which its parent ends in time."""
    global _state
    if _state is None:
        return
    _state = None
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGTERM, WAKES):
        signal.signal(signum, signal.SIG_DFL)
    for signum in HANDLED[1:]:
        signal.signal(signum, signal.SIG_IGN)
