"""A signal is recorded during a step and ends the program elsewhere; a second one always does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from app.process import signals
from tests.conftest import ROOT
from tests.processes import AT_ONCE, LONGEST, ends_within

BEGIN = """
import os, signal, sys, time
from app.process import signals
from app.process.reporting import report
def write(word):
    os.write(1, f"{word}\\n".encode())
signals.install_signal_handlers()
"""
OUTSIDE = """
try:
    write("ready")
    time.sleep(30)
except SystemExit as error:
    sys.exit(report(error))
"""
IN_A_STEP = """
signals.defer_signals(True)
write("ready")
while signals.signal_received() is None:
    time.sleep(0.01)
write("received")
"""

A_RANK = {"LOFT_RUN_DIR": "run", "LOFT_PARENT": str(os.getpid())}
"""environment variables of a process started by the supervisor"""


def _reset_signals() -> None:
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)


class Process:
    """A script that prints "ready" when a signal may be sent."""

    def __init__(self, *parts: str, environment: Mapping[str, str] | None = None) -> None:
        code = "\n".join([BEGIN, *parts])
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=os.environ | dict(environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Background jobs and nohup ignore some signals, which the script would inherit.
            preexec_fn=_reset_signals,
            start_new_session=True,
        )
        self.read("ready")

    def read(self, word: str) -> None:
        """Check that the next line on stdout is `word`."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == f"{word}\n"

    def send(self, signum: int) -> None:
        self.process.send_signal(signum)

    def end(self) -> tuple[int, str]:
        """Wait for the end of the process; return its exit code and stderr."""
        stderr = self.process.communicate(timeout=LONGEST)[1]
        return self.process.returncode, stderr


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGUSR1, 138)]
)
def test_outside_a_step_a_signal_ends_the_program(signum: signal.Signals, code: int) -> None:
    process = Process(OUTSIDE)
    process.send(signum)
    assert process.end() == (code, f"\nstopped by {signum.name}: not during a training step\n")


@pytest.mark.parametrize(
    ("name", "environment"), [("SAME_SIGNAL_SECONDS", {}), ("SAME_SIGNAL_SECONDS_OF_RANK", A_RANK)]
)
def test_a_step_is_finished_before_the_program_ends(name: str, environment: dict[str, str]) -> None:
    process = Process(
        f"signals.{name} = 20.0",
        IN_A_STEP,
        "signals.defer_signals(True)",
        "time.sleep(1.5)",
        "signals.defer_signals(False)",
        environment=environment,
    )
    process.send(signal.SIGTERM)
    process.read("received")
    time.sleep(0.3)
    process.send(signal.SIGTERM)  # as if forwarded by a launcher: counts as the same signal
    code, stderr = process.end()
    assert code == 143
    assert "Interrupted" not in stderr and "exited immediately" not in stderr


@pytest.mark.parametrize(
    ("environment", "signum", "seconds"),
    [({}, signal.SIGINT, 0.3), (A_RANK, signal.SIGTERM, 2 * signals.SAME_SIGNAL_SECONDS_OF_RANK)],
)
def test_a_second_signal_ends_a_step_immediately(
    environment: dict[str, str], signum: signal.Signals, seconds: float
) -> None:
    process = Process(IN_A_STEP, "time.sleep(30)", environment=environment)
    process.send(signum)
    process.read("received")
    time.sleep(seconds)
    before = time.monotonic()
    process.send(signal.SIGINT)
    assert process.end() == (130, "SIGINT: exited immediately (a second signal)\n")
    assert time.monotonic() - before < AT_ONCE


def test_a_program_that_catches_every_exception_is_ended() -> None:
    stuck = """
signals._EXIT_SECONDS = 0.5
is_ready = False
while True:
    try:
        if not is_ready:
            write("ready")
        is_ready = True
        time.sleep(30)
    except BaseException:
        pass
"""
    process = Process(stuck)
    process.send(signal.SIGTERM)
    assert process.end() == (143, "SIGTERM: exited immediately (the program did not end in time)\n")


STUCK = """
import ctypes
def hang():  # in a call that no signal interrupts
    mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)
"""
READS = """
signals.defer_signals(True)
signals.mark_waiting_for_data(True)
reader, writer = os.pipe()
"""


@pytest.mark.parametrize(
    ("read", "stderr"),
    [
        ("os.read(reader, 1)", "\nstopped by SIGTERM: the data of the next step did not arrive\n"),
        ("hang()", "SIGTERM: exited immediately (the program did not end in time)\n"),
    ],
    ids=["interruptible", "library"],
)
@pytest.mark.slow
def test_stalled_data_is_not_waited_for_after_a_signal(read: str, stderr: str) -> None:
    lines = ("write('ready')", read)
    ends = "\n".join(["try:", *(f"    {line}" for line in lines)])
    process = Process(STUCK, READS, ends, "except SystemExit as error: sys.exit(report(error))")
    before = time.monotonic()
    process.send(signal.SIGTERM)
    assert process.end() == (143, stderr)
    assert time.monotonic() - before < ends_within()


@pytest.mark.slow
def test_a_step_whose_data_arrives_in_time_is_finished() -> None:
    process = Process(
        "import threading",
        "signals._DATA_SECONDS = 3.0",
        READS,
        "threading.Timer(0.7, os.write, (writer, b'x')).start()",
        "write('ready')",
        "assert os.read(reader, 1) == b'x'",
        "signals.mark_waiting_for_data(False)",
        "time.sleep(4)",
        "write(f'saved after {signals.signal_received()}')",
        "signals.mark_waiting_for_data(True)",  # for the next step, which does not start
        "signals.mark_waiting_for_data(False)",
        "signals.defer_signals(False)",
    )
    process.send(signal.SIGTERM)
    process.read("saved after 15")
    assert process.end()[0] == 143


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
def test_workers_of_a_stuck_process_are_killed() -> None:
    process = Process(
        STUCK,
        "import multiprocessing",
        "def work():",
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)",
        "    time.sleep(60)",
        "worker = multiprocessing.get_context('fork').Process(target=work)",
        "worker.start()",
        "write('ready')",
        "write(worker.pid)",
        "hang()",
    )
    assert process.process.stdout is not None
    worker = process.process.stdout.readline().strip()
    before = time.monotonic()
    process.send(signal.SIGTERM)
    assert process.end()[0] == 143
    while Path(f"/proc/{worker}").exists():
        assert time.monotonic() - before < ends_within(), "a worker is left"
        time.sleep(0.02)


def test_forked_workers_leave_signals_to_their_parent() -> None:
    fork = """
reader, writer = os.pipe()
if os.fork() == 0:
    os.write(writer, b"up")  # a signal during the fork itself runs the parent's handler
    time.sleep(1.5)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    os.kill(os.getpid(), signal.SIGUSR1)  # must not count as a second signal of the parent
    os.write(writer, b"alive")
    os._exit(0)
os.read(reader, 2)
"""
    process = Process(fork, IN_A_STEP, "write(os.read(reader, 9).decode())")
    os.killpg(process.process.pid, signal.SIGINT)
    process.read("received")
    process.read("alive")
    assert process.end() == (0, "")


def test_handlers_that_a_library_replaced_are_restored_and_ignored_signals_stay_ignored() -> None:
    library = "signal.signal(signal.SIGTERM, lambda *_: write('handled by the library'))"
    ignoring = "signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    process = Process(library, ignoring, "signals.restore_handlers()", OUTSIDE)
    process.send(signal.SIGHUP)
    process.send(signal.SIGTERM)
    assert process.end() == (143, "\nstopped by SIGTERM: not during a training step\n")


@pytest.mark.slow
def test_a_process_without_a_signal_ends_after_everything_is_saved() -> None:
    process = Process(
        "signals.exit_after_grace()", 'write("ready")', "signal.pthread_sigmask", "time.sleep(30)"
    )
    assert process.process.wait(timeout=LONGEST) == 128 + signal.SIGTERM


def test_a_process_waits_for_its_threads_and_ends_without_finalizing() -> None:
    aborts = """
class Aborts:
    def __del__(self, abort=os.abort):
        abort()
sys.modules["of a process group"] = Aborts()
"""
    thread = "threading.Thread(target=lambda: time.sleep(0.2) or os.write(2, b'done')).start()"
    ends = ("import threading", thread, 'write("ready")', "signals.end_process(2)")
    assert Process(aborts, *ends).end() == (2, "done")


def test_a_rank_that_waits_for_termination_keeps_its_exit_code() -> None:
    code = (
        "import os, signal, sys, threading, time\n"
        "from app.process.signals import install_signal_handlers, wait_for_termination\n"
        "install_signal_handlers()\n"
        "before = signal.getsignal(signal.SIGINT)\n"
        "def send():\n"
        "    while signal.getsignal(signal.SIGINT) is before: time.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "threading.Thread(target=send).start()\n"
        "wait_for_termination(600)\n"
        "sys.exit(138)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=LONGEST
    )
    assert (done.returncode, done.stderr) == (138, "")
