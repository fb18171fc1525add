"""The `python` whose commands are forks ends with the exit code of its command."""

from __future__ import annotations

import signal
import subprocess
import time

import pytest

from tests.processes import LONGEST
from tests.reliability.shell import Shell


@pytest.mark.slow
@pytest.mark.parametrize("signals", [(), (signal.SIGHUP,), (signal.SIGHUP, signal.SIGTERM)])
def test_a_signal_after_the_end_does_not_change_the_exit_code(
    signals: tuple[signal.Signals, ...], shell: Shell
) -> None:
    program = "import sys; print('begun', flush=True); sys.stdin.read(); sys.exit(7)"
    process = subprocess.Popen(
        [shell.python, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    process.send_signal(signal.SIGSTOP)
    process.stdin.close()
    assert process.stdout.read() == b""  # the command has ended, but its proxy has not
    time.sleep(0.2)
    for number in signals:
        process.send_signal(number)
    process.send_signal(signal.SIGCONT)
    assert process.wait(LONGEST) == 7
