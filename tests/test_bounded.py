from __future__ import annotations

import signal
import subprocess
import threading
import time

import pytest

from tests.bounded import bounded, on_alarm


def test_a_test_that_hangs_fails_with_its_stacks_and_its_processes_are_killed() -> None:
    """Also if an inner alarm went off before."""
    before = subprocess.Popen(["sleep", "60"])
    time.sleep(0.02)  # two ticks of the clock by which a process's start is known
    with (
        pytest.raises(pytest.fail.Exception, match="took more than 1 s") as caught,
        bounded(1),
    ):
        hangs = subprocess.Popen(["sleep", "60"])
        rung = threading.Event()
        with on_alarm(0.05, rung.set):
            rung.wait()
        threading.Event().wait()
    said = str(caught.value)
    assert hangs.wait() == -signal.SIGKILL and f"{hangs.pid} sleep 60" in said
    assert "in test_a_test_that_hangs_fails" in said
    assert before.poll() is None and f"{before.pid} sleep" not in said
    before.kill()
    before.wait()
