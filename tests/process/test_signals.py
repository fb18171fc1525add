"""What a signal does to a process: noted in a step, acted on elsewhere, the second one obeyed."""

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
from tests.processes import LONGEST, ends_within

BEGIN = """
import os, signal, sys, time
from app.process import signals
from app.process.reporting import report
def say(word):
    os.write(1, f"{word}\\n".encode())
signals.install_signal_handlers()
"""
OUTSIDE = """
try:
    say("ready")
    time.sleep(30)
except SystemExit as error:
    sys.exit(report(error))
"""
IN_A_STEP = """
signals.wait_for_step(True)
say("ready")
while signals.signal_received() is None:
    time.sleep(0.01)
say("noted")
"""

A_RANK = {"LOFT_RUN_DIR": "run", "LOFT_PARENT": str(os.getpid())}
"""what a process finds that a supervisor of ours has started"""


def _heed_signals() -> None:
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)


class Process:
    """A script that says "ready" when it may be disturbed."""

    def __init__(self, *parts: str, environment: Mapping[str, str] | None = None) -> None:
        code = "\n".join([BEGIN, *parts])
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=os.environ | dict(environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # As in a terminal: background jobs and nohup ignore some, and so would the script.
            preexec_fn=_heed_signals,
            start_new_session=True,
        )
        self.hear("ready")

    def hear(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == f"{word}\n"

    def send(self, signum: int) -> None:
        self.process.send_signal(signum)

    def end(self) -> tuple[int, str]:
        """Return its exit code and what it said on stderr."""
        said = self.process.communicate(timeout=LONGEST)[1]
        return self.process.returncode, said


@pytest.mark.parametrize(
    ("signum", "code"),
    [
        (signal.SIGTERM, 143),
        (signal.SIGINT, 130),
        (signal.SIGHUP, 129),
        (signal.SIGUSR1, 138),
    ],
)
def test_outside_of_a_step_the_program_ends_where_it_stands(
    signum: signal.Signals, code: int
) -> None:
    process = Process(OUTSIDE)
    process.send(signum)
    assert process.end() == (code, f"\nstopped by {signum.name}: not during a training step\n")


@pytest.mark.parametrize(
    ("name", "environment"), [("SAME_PRESS", {}), ("SAME_PRESS_OF_A_RANK", A_RANK)]
)
def test_a_step_is_ended_first_and_the_rest_is_left(name: str, environment: dict[str, str]) -> None:
    process = Process(
        f"signals.{name} = 20.0",
        IN_A_STEP,
        "signals.wait_for_step(True)",
        "time.sleep(1.5)",
        "signals.wait_for_step(False)",
        environment=environment,
    )
    process.send(signal.SIGTERM)
    process.hear("noted")
    time.sleep(0.3)
    process.send(signal.SIGTERM)  # a launcher sends it on: the same one
    code, said = process.end()
    assert code == 143
    assert "Interrupted" not in said and "exited at once" not in said


@pytest.mark.parametrize("environment", [{}, A_RANK])
def test_a_second_signal_is_obeyed_at_once_whatever_the_program_does(
    environment: dict[str, str],
) -> None:
    process = Process(IN_A_STEP, "time.sleep(30)", environment=environment)
    process.send(signal.SIGTERM)
    process.hear("noted")
    time.sleep(2 * signals.SAME_PRESS_OF_A_RANK)
    process.send(signal.SIGINT)
    assert process.end() == (130, "SIGINT: exited at once (a second signal)\n")


def test_a_library_that_keeps_the_program_from_ending_is_left_behind() -> None:
    stuck = """
signals.EXIT_SECONDS = 0.5
is_ready = False
while True:
    try:
        if not is_ready:
            say("ready")
        is_ready = True
        time.sleep(30)
    except BaseException:
        pass
"""
    process = Process(stuck)
    process.send(signal.SIGTERM)
    assert process.end() == (143, "SIGTERM: exited at once (did not end by itself)\n")


STUCK = """
import ctypes
def hang():  # in a call that no signal ends
    mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)
"""
READS = """
signals.wait_for_step(True)
signals.wait_for_data(True)
listens, tells = os.pipe()
"""


@pytest.mark.parametrize(
    ("read", "said"),
    [
        ("os.read(listens, 1)", "\nstopped by SIGTERM: the data of the next step did not come\n"),
        ("hang()", "SIGTERM: exited at once (did not end by itself)\n"),
    ],
    ids=["a slow reader", "a library"],
)
@pytest.mark.slow
def test_data_that_does_not_come_is_not_waited_for(read: str, said: str) -> None:
    lines = ("say('ready')", read)
    ends = "\n".join(["try:", *(f"    {line}" for line in lines)])
    process = Process(STUCK, READS, ends, "except SystemExit as error: sys.exit(report(error))")
    before = time.monotonic()
    process.send(signal.SIGTERM)
    assert process.end() == (143, said)
    assert time.monotonic() - before < ends_within()


@pytest.mark.slow
def test_data_that_comes_in_time_lets_the_step_end() -> None:
    process = Process(
        "import threading",
        READS,
        "threading.Timer(0.7, os.write, (tells, b'x')).start()",
        "say('ready')",
        "assert os.read(listens, 1) == b'x'",
        "signals.wait_for_data(False)",
        "time.sleep(4)",
        "say(f'saved after {signals.signal_received()}')",
        "signals.wait_for_data(True)",  # of the next step, which is not started
        "signals.wait_for_data(False)",
        "signals.wait_for_step(False)",
    )
    process.send(signal.SIGTERM)
    process.hear("saved after 15")
    assert process.end()[0] == 143


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
def test_workers_end_with_a_process_that_is_stuck() -> None:
    process = Process(
        STUCK,
        "import multiprocessing",
        "def work():",
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)",
        "    time.sleep(60)",
        "worker = multiprocessing.get_context('fork').Process(target=work)",
        "worker.start()",
        "say('ready')",
        "say(worker.pid)",
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


def test_ctrl_c_pressed_twice_ends_a_step_at_once() -> None:
    process = Process(IN_A_STEP, "time.sleep(30)")
    process.send(signal.SIGINT)
    process.hear("noted")
    time.sleep(0.3)
    process.send(signal.SIGINT)
    assert process.end() == (130, "SIGINT: exited at once (a second signal)\n")


def test_forked_workers_leave_signals_to_the_process_that_they_work_for() -> None:
    fork = """
listens, tells = os.pipe()
if os.fork() == 0:
    os.write(tells, b"up")  # a signal within the fork itself finds the parent's handler
    time.sleep(1.5)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    os.kill(os.getpid(), signal.SIGUSR1)  # not the second one of its parent
    os.write(tells, b"whole")
    os._exit(0)
os.read(listens, 2)
"""
    process = Process(fork, IN_A_STEP, "say(os.read(listens, 9).decode())")
    os.killpg(process.process.pid, signal.SIGINT)
    process.hear("noted")
    process.hear("whole")
    assert process.end() == (0, "")


def test_what_was_ignored_at_the_start_stays_ignored() -> None:
    ignoring = "signal.signal(signal.SIGHUP, signal.SIG_IGN)\nsignals.take_handlers()"
    process = Process(ignoring, OUTSIDE)
    process.send(signal.SIGHUP)
    process.send(signal.SIGTERM)
    assert process.end()[0] == 143


def test_handlers_are_taken_back_from_a_library() -> None:
    library = "signal.signal(signal.SIGTERM, lambda *_: say('the library heard'))"
    process = Process(library, "signals.take_handlers()", OUTSIDE)
    process.send(signal.SIGTERM)
    assert process.end() == (143, "\nstopped by SIGTERM: not during a training step\n")


def test_a_process_without_signal_handlers_is_left_as_it_is() -> None:
    before = signal.getsignal(signal.SIGTERM)
    signals.take_handlers()
    signals.wait_for_step(True)
    signals.wait_for_step(False)
    assert signals.signal_received() is None
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.slow
def test_a_process_that_received_no_signal_itself_ends_where_all_is_saved() -> None:
    process = Process(
        "signals.exit_after_grace()", 'say("ready")', "signal.pthread_sigmask", "time.sleep(30)"
    )
    assert process.process.wait(timeout=LONGEST) == 128 + signal.SIGTERM


@pytest.mark.parametrize("code", [0, 2])
def test_a_rank_is_not_finalized_under_its_process_group(code: int) -> None:
    aborts = """
class Group:
    def __del__(self, abort=os.abort):
        abort()
from types import SimpleNamespace
group = Group()
sys.modules["torch.distributed"] = SimpleNamespace(
    is_available=lambda: True, is_initialized=lambda: True, group=group
)
"""
    assert Process(aborts, 'say("ready")', f"signals.end_process({code})").end() == (code, "")


def test_a_rank_that_waits_to_be_ended_keeps_its_exit_code() -> None:
    code = (
        "import os, signal, sys, threading\n"
        "from app.process.signals import install_signal_handlers, wait_to_be_ended\n"
        "install_signal_handlers()\n"
        "threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGTERM]).start()\n"
        "wait_to_be_ended(60)\n"
        "sys.exit(138)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stderr) == (138, "")
