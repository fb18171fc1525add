"""Handling of SIGTERM, SIGINT, SIGHUP and SLURM's SIGUSR1: a step is finished first.

During a training step the handler only records the signal, and the training loop acts on it after
the step. Outside the training loop, or if the loop waits for data that does not come, the program
ends immediately. A thread receives the signals too, since Python runs no handler while a library
computes. If nothing has to be saved first, the program ends within EXITS_WITHIN seconds.
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

from app.process.launch import is_child
from common.errors import Interrupted

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_MEASURED_AGAIN = "the interrupted measurement will be repeated"
_WAKES = signal.SIGURG
"""signal that interrupts a system call of the main thread; ignored by default"""
# A terminal and an external launcher may send the same signal together. A supervised rank gets
# the terminal's signal, then the one forwarded by the supervisor, which polls every 0.1 s.
SAME_SIGNAL_SECONDS = 0.1
"""time within which two signals count as one"""
SAME_SIGNAL_SECONDS_OF_RANK = 0.5
"""the same in a rank started by the supervisor"""
_POLL_SECONDS = 0.25
"""interval between two checks of the deadlines; a signal is received immediately"""
_EXIT_SECONDS = 2.5
"""time for the program to end by itself if nothing has to be saved first"""
_WORKER_SECONDS = 1.0
"""time, within _EXIT_SECONDS, after which the worker processes are killed"""
_DATA_SECONDS = 1.5
"""time that a training step may wait for its data after a signal"""
EXITS_WITHIN = _DATA_SECONDS + _EXIT_SECONDS
"""maximum time in seconds from a signal to the end of the program if nothing has to be saved"""


@dataclass(slots=True)
class _State:
    is_rank: bool
    """whether this process is a rank started by the supervisor"""
    signum: int | None = None
    """the first signal received"""
    defers_signals: bool = False
    """whether signals are only recorded: the training loop polls for them between steps"""
    waits_since: float | None = None
    """when the training loop began to wait for data or to measure; None if it does neither"""
    stall_message: str = ""
    """what the message says if a signal ends that wait"""
    is_overdue: bool = False
    """whether the wait has lasted longer than _DATA_SECONDS after a signal"""
    exits_since: float | None = None
    """when the program began to end, by the monotonic clock"""


_state: _State | None = None


class DataStalled(Interrupted):
    """A signal ended the run while its training loop was waiting for data, or measuring."""


class MeasurementInterrupted(DataStalled):
    """A signal ended a measurement, and all ranks have agreed on it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum, _MEASURED_AGAIN)


def install_signal_handlers() -> None:
    """Handle the signals of this process from now on; call in its main thread."""
    global _state
    if _state is not None:
        return
    _state = _State(is_rank=is_child())
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    signal.set_wakeup_fd(sender.detach(), warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(receiver, _state), daemon=True).start()
    os.register_at_fork(after_in_child=_uninstall_in_fork)
    restore_handlers()


def restore_handlers() -> None:
    """Install the handlers again after a library has installed its own."""
    if _state is not None:
        for signum in HANDLED:
            if signal.getsignal(signum) != signal.SIG_IGN:  # set by nohup
                signal.signal(signum, _handle)
        signal.signal(_WAKES, _handle_stall)


def defer_signals(is_deferred: bool) -> None:
    """Start or stop only recording signals, for a loop that polls `signal_received`.

    Raises Interrupted at the end if a signal was received in the meantime.
    """
    if _state is None:
        return
    if not is_deferred and _state.signum is not None:
        _raise_interrupted(_state)
    _state.defers_signals = is_deferred
    if not is_deferred and _state.signum is not None:  # received between the two statements
        _raise_interrupted(_state)


def mark_waiting_for_data(is_waiting: bool) -> None:
    _mark_waiting(is_waiting, "the data of the next step did not arrive")


@contextlib.contextmanager
def measuring() -> Iterator[None]:
    """Let a signal end a measurement within _DATA_SECONDS, as it ends a wait for data."""
    _mark_waiting(True, _MEASURED_AGAIN)
    try:
        yield
    finally:
        _mark_waiting(False, "")


def _mark_waiting(is_waiting: bool, stall_message: str) -> None:
    if _state is not None:
        _state.stall_message = stall_message
        _state.waits_since = time.monotonic() if is_waiting else None


def suspend_deadline() -> None:
    """Suspend the deadline while this process saves; call `exit_after_grace` afterwards."""
    if _state is not None:
        _state.exits_since = None


def exit_after_grace() -> None:
    """Kill this process after _EXIT_SECONDS if it has not ended by then: everything is saved."""
    if _state is not None:
        _state.exits_since = time.monotonic()


def end_process(code: int) -> NoReturn:
    """End this process with `code`; if it handles signals, without finalizing Python.

    Finalizing takes up to seconds, in which no thread can enforce the deadline. With the threads of
    a process group it may abort (torch 2.13, gloo: "terminate called without an active exception"),
    which would replace the exit code.
    """
    if _state is None:
        sys.exit(code)
    distributed = sys.modules.get("torch.distributed")  # imported if there is a process group
    has_group = distributed and distributed.is_available() and distributed.is_initialized()
    if _state.signum is None and not has_group:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as Python does
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def wait_for_termination(seconds: float) -> None:
    """Wait for SIGTERM or SIGINT, for at most `seconds`; the caller keeps its own exit code."""
    received = threading.Event()
    signal.set_wakeup_fd(-1)  # a second signal would end the program with that signal's exit code
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda signum, frame: received.set())
    received.wait(seconds)


def signal_received() -> int | None:
    """Return the first signal received, None if there was none."""
    return None if _state is None else _state.signum


def _handle(signum: int, frame: FrameType | None) -> None:
    if _state is None:
        return
    if _state.signum is None:
        _state.signum = signum
    if not _state.defers_signals and _state.exits_since is None:
        _raise_interrupted(_state)


def _handle_stall(signum: int, frame: FrameType | None) -> None:
    if _state is None or not _state.is_overdue or _state.exits_since is not None:
        return
    if _state.waits_since is not None:
        _state.exits_since = time.monotonic()
        raise DataStalled(_state.signum or signal.SIGTERM, _state.stall_message)


def _raise_interrupted(state: _State) -> None:
    state.exits_since = time.monotonic()
    assert state.signum is not None
    raise Interrupted(state.signum, "not during a training step")


def _watch(receiver: socket.socket, state: _State) -> None:
    """Exit on a second signal, or _EXIT_SECONDS after a signal outside the training loop."""
    received_at: float | None = None
    overdue_at: float | None = None
    number, main = int(signal.SIGTERM), threading.main_thread().ident
    assert main is not None
    while True:
        if state.waits_since is None:  # the data has arrived after all
            overdue_at, state.is_overdue = None, False
        exits_since = state.exits_since or overdue_at
        if exits_since is None and not state.defers_signals:
            exits_since = received_at
        if exits_since is not None and time.monotonic() - exits_since > _WORKER_SECONDS:
            kill_workers()
        if exits_since is not None and time.monotonic() - exits_since > _EXIT_SECONDS:
            _exit_now(state.signum or number, "the program did not end in time")
        if overdue_at is None and _is_stalled(state, received_at):
            overdue_at, state.is_overdue = time.monotonic(), True
            signal.pthread_kill(main, _WAKES)
        receiver.settimeout(_POLL_SECONDS)  # a deadline may pass without a signal
        try:
            numbers = set(receiver.recv(64)) & set(HANDLED)
        except TimeoutError:
            continue
        if not numbers:
            continue
        same_seconds = SAME_SIGNAL_SECONDS_OF_RANK if state.is_rank else SAME_SIGNAL_SECONDS
        if received_at is None:
            received_at, number = time.monotonic(), min(numbers)
            state.signum = state.signum or number  # before a handler of a library
        elif time.monotonic() - received_at > same_seconds:
            _exit_now(min(numbers), "a second signal")


def _is_stalled(state: _State, received_at: float | None) -> bool:
    """Return whether a step has waited longer than _DATA_SECONDS for its data after the signal."""
    since = state.waits_since
    if received_at is None or since is None or not state.defers_signals:
        return False
    return time.monotonic() - max(received_at, since) > _DATA_SECONDS


def kill_workers() -> None:
    """Kill the worker processes, which this process would otherwise wait for at its end."""
    for worker in multiprocessing.active_children():
        worker.kill()


def _exit_now(signum: int, reason: str) -> None:
    kill_workers()
    name = signal.Signals(signum).name
    with contextlib.suppress(OSError):
        os.write(2, f"{name}: exited immediately ({reason})\n".encode())
    os._exit(128 + signum)


def _uninstall_in_fork() -> None:
    """Ignore signals in a forked process: its parent ends it."""
    global _state
    if _state is None:
        return
    _state = None
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGTERM, _WAKES):
        signal.signal(signum, signal.SIG_DFL)
    for signum in HANDLED[1:]:
        signal.signal(signum, signal.SIG_IGN)
