"""Fail a test that hangs: with the stacks of its threads, after ending the processes it started."""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.processes import LONGEST, children_of

PHASE_SECONDS = LONGEST + 60
"""time limit of a test, and of its set-up; a process that hangs, which says more, has less"""


@contextmanager
def on_alarm(seconds: float, stop: Callable[[], object], again: float = 0) -> Iterator[None]:
    """Call `stop` in the main thread after `seconds`, and then every `again` seconds unless 0.

    An outer alarm goes on afterwards.
    """
    maker = os.getpid()

    def stop_here(number: int, *_: Any) -> None:
        if os.getpid() != maker:  # a fork, which has alarms of its own
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        stop()

    handler = signal.signal(signal.SIGALRM, stop_here)
    outer = signal.setitimer(signal.ITIMER_REAL, seconds, again)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *outer)
        signal.signal(signal.SIGALRM, handler)


@contextmanager
def bounded(seconds: float = PHASE_SECONDS) -> Iterator[None]:
    """Fail the test after `seconds`; processes that it has started since are killed.

    Only where Python runs: pytest's `faulthandler_timeout` ends a worker that hangs in C++.
    """
    began = time.clock_gettime(time.CLOCK_BOOTTIME)

    def fail() -> None:
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            stacks = file.read()
        killed = "\n".join(_kill_those_started_since(began))
        pytest.fail(f"took more than {seconds:.4g} s\nkilled:\n{killed}\n{stacks}")

    # Again each minute, since an exception in a destructor is lost.
    with on_alarm(seconds, fail, again=60):
        yield


def _kill_those_started_since(began: float) -> Iterator[str]:
    """Kill each process below this one that was started after `began`; yield their commands."""
    below = [os.getpid()]
    for pid in below:
        with suppress(OSError):
            below += children_of(pid)
    for pid in below[1:]:
        with suppress(OSError):
            ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
            if int(ticks) >= int(began * os.sysconf("SC_CLK_TCK")):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                os.kill(pid, signal.SIGKILL)
                yield f"{pid} {b' '.join(words).decode(errors='replace')[:300]}"
