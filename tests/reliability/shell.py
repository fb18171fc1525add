"""Runs commands as a user does, in a fork of a warm process or a new interpreter."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.process.launch import PARENT_VARIABLE
from tests.processes import GONE_WITHIN, LONGEST, start
from tests.reliability.python import RECORD_VARIABLE, SESSIONS, WARM_VARIABLE, start_warm

LOG = "log.txt"
"""file next to a run's folder: the output of all its processes"""
LINES = "stdin.txt"
"""file next to a run's folder: the standard input of its processes"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExitStatus:
    """How a command ended."""

    code: int
    """exit code, negative for a signal"""
    output: str
    """standard output and error"""
    seconds_until_gone: float
    """seconds from its end to that of the last process that it had started"""


class Shell:
    """Runs the commands of a user."""

    def __init__(self, cache: Path) -> None:
        """Wait for the warm process; `cache` is the folder of tokenized data."""
        self.environment = {"LOFT_DATA_CACHE": str(cache)}
        self.python = warm_python()
        """an interpreter whose commands are forks of the warm process, also below torchrun"""
        # CUDA libraries start threads on import, which a fork would not have.
        self._can_fork = not Path("/dev/nvidiactl").exists()

    def type_train(
        self,
        words: Sequence[str],
        folder: Path,
        *,
        module: str = "app.train",
        lines: str = "",
        is_warm: bool = True,
        environment: Mapping[str, str] | None = None,
        meanwhile: Callable[[int], None] | None = None,
    ) -> ExitStatus:
        """Run `python -m app.train` with `words`, logging to `folder`; wait for its end.

        `lines` are its standard input. `meanwhile` is called with its process id once it runs.
        """
        log, sessions = folder / LOG, folder / SESSIONS
        begins = log.stat().st_size if log.exists() else 0
        sessions.unlink(missing_ok=True)
        (folder / LINES).write_text(lines)
        python = self.python if is_warm and self._can_fork else sys.executable
        own = {RECORD_VARIABLE: str(folder), PARENT_VARIABLE: str(os.getpid())}
        with log.open("ab") as output, (folder / LINES).open() as typed:
            variables = self.environment | dict(environment or {}) | own
            streams = {"stdin": typed, "stdout": output, "stderr": output}
            process = start(python, "-m", module, *words, environment=variables, **streams)
        with sessions.open("a") as file:  # to which the command adds its own
            file.write(f"{process.pid}\n")
        too_long = threading.Timer(LONGEST, end_command, (folder, signal.SIGABRT))
        too_long.start()
        try:
            if meanwhile is not None:
                meanwhile(process.pid)
            code = process.wait()
            seconds = _wait_until_gone(folder)
        finally:
            too_long.cancel()
            end_command(folder)
            process.wait()
        printed = log.read_bytes()[begins:].decode(errors="replace")
        return ExitStatus(code=code, output=printed, seconds_until_gone=seconds)

    def train_into(self, run: Path, *words: str, code: int = 0, **options: Any) -> str:
        """Train into the folder `run`; check the exit code `code`, return the output."""
        ending = self.type_train([*words, f"output.dir={run}"], run.parent, **options)
        assert ending.code == code, ending.output
        return ending.output


@functools.cache
def warm_python() -> str:
    """Return the interpreter of the session's warm process, or of one of this process."""
    file = Path(os.environ.get(WARM_VARIABLE) or start_warm())
    until = time.monotonic() + LONGEST
    while not file.exists():
        assert time.monotonic() < until, "the warm process has not started"
        time.sleep(0.02)
    return str(file)


@functools.cache
def shared_shell() -> Shell:
    """Return the shell of all tests of this process."""
    return Shell(Path(os.environ["LOFT_DATA_CACHE"]))


def processes_of_command(folder: Path) -> list[int]:
    """Return the running processes of a command that logs to `folder`, with all it has started."""
    sessions = set((folder / SESSIONS).read_text().split())
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, *numbers = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if numbers[2] in sessions and state not in "ZX":
            found.append(int(entry.name))
    return found


def _wait_until_gone(folder: Path) -> float:
    began = time.monotonic()
    while processes_of_command(folder) and time.monotonic() - began < GONE_WITHIN:
        time.sleep(0.02)
    return time.monotonic() - began


def end_command(folder: Path, signum: int = signal.SIGKILL) -> None:
    """Kill the remaining processes of a command."""
    for pid in processes_of_command(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
