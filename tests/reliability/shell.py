"""Runs commands as a user does, in a fork of a warm process or a new interpreter."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.process.launch import PARENT_VARIABLE
from tests.conftest import ROOT
from tests.processes import GONE_WITHIN, LONGEST, user_environment

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
    """Runs the commands of a user, one at a time."""

    def __init__(self, cache: Path, *, root: Path = ROOT) -> None:
        """Start the warm process; `cache`: folder of tokenized data, `root`: of the program."""
        self.environment = {
            "OMP_NUM_THREADS": "1",
            "LOFT_DATA_CACHE": str(cache),
            "GOMP_SPINCOUNT": "1000",
            "PYTHONFAULTHANDLER": "1",  # prints stacks if a command takes too long
        }
        # A short name, since it is part of a socket's path.
        self._python = Path(tempfile.mkdtemp(prefix="loft")) / "python"
        # Start it in the thread that lives longest: it is killed when that thread ends.
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.reliability.warm", str(self._python)],
            cwd=root,
            env=self._environment() | {PARENT_VARIABLE: str(os.getpid())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._is_ready = False
        # CUDA libraries start threads on import, which a fork would not have.
        self._can_fork = not Path("/dev/nvidiactl").exists()

    def _environment(self) -> dict[str, str]:
        return user_environment() | self.environment

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
        log = folder / LOG
        begins = log.stat().st_size if log.exists() else 0
        (folder / LINES).write_text(lines)
        start = self._start_warm if is_warm and self._can_fork else self._start_cold
        pid, wait = start(module, words, folder, environment or {})
        too_long = threading.Timer(LONGEST, end_session, (pid, signal.SIGABRT))
        too_long.start()
        try:
            try:
                if meanwhile is not None:
                    meanwhile(pid)
            except BaseException:
                end_session(pid)
                wait()  # otherwise the next command would receive this one's exit code
                raise
            code = wait()
            seconds = _wait_until_gone(pid)
        finally:
            too_long.cancel()
            end_session(pid)
        output = log.read_bytes()[begins:].decode(errors="replace")
        return ExitStatus(code=code, output=output, seconds_until_gone=seconds)

    def train_into(self, run: Path, *words: str, code: int = 0, **options: Any) -> str:
        """Train into the folder `run`; check the exit code `code`, return the output."""
        ending = self.type_train([*words, f"output.dir={run}"], run.parent, **options)
        assert ending.code == code, ending.output
        return ending.output

    def _start_cold(
        self, module: str, words: Sequence[str], folder: Path, environment: Mapping[str, str]
    ) -> tuple[int, Callable[[], int]]:
        with (folder / LOG).open("ab") as log, (folder / LINES).open() as lines:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *words],
                cwd=ROOT,
                env=self._environment() | dict(environment),
                stdin=lines,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return process.pid, process.wait

    def _start_warm(
        self, module: str, words: Sequence[str], folder: Path, environment: Mapping[str, str]
    ) -> tuple[int, Callable[[], int]]:
        self._wait_until_ready()
        request = {
            "module": module,
            "words": list(words),
            "stdin": str(folder / LINES),
            "log": str(folder / LOG),
            "record": str(folder),
            "num_processes": _num_processes_of_ranks(words),
            "environment": dict(environment),
        }
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return self._answer()["pid"], lambda: self._answer()["code"]

    @property
    def python(self) -> str:
        """An interpreter whose commands are forks of the warm process, also below torchrun."""
        self._wait_until_ready()
        return str(self._python)

    def _wait_until_ready(self) -> None:
        if not self._is_ready:
            self._is_ready = bool(self._answer())

    def _answer(self) -> dict[str, Any]:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        if not line:
            raise RuntimeError("the warm process has ended")
        return json.loads(line)

    def close(self) -> None:
        """End the warm process."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        if not self._is_ready:  # still importing
            self._server.terminate()
        try:
            self._server.wait(5)
        except subprocess.TimeoutExpired:
            # A leftover data loader worker of a test also holds the other end of the pipe.
            self._server.terminate()
            self._server.wait(LONGEST)
        shutil.rmtree(self._python.parent, ignore_errors=True)


@functools.cache
def shared_shell() -> Shell:
    """Return the shell of all tests of this process, which conftest.py closes."""
    return Shell(Path(os.environ["LOFT_DATA_CACHE"]))


def _num_processes_of_ranks(words: Sequence[str]) -> int:
    """Return how many rank processes a command may start, 0 if it is the only process."""
    chosen = dict(word.partition("=")[::2] for word in words)
    ranks = int(chosen.get("trainer.devices", 1))
    starts = 1 + int(chosen.get("supervise.max_restarts", 0))
    return ranks * starts if max(ranks, starts) > 1 else 0


def processes_of_session(session: int) -> list[int]:
    """Return the processes of a command: its own, its ranks and their data loader workers."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, *numbers = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(numbers[2]) == session and state not in "ZX":
            found.append(int(entry.name))
    return found


def _wait_until_gone(session: int) -> float:
    began = time.monotonic()
    while processes_of_session(session) and time.monotonic() - began < GONE_WITHIN:
        time.sleep(0.02)
    return time.monotonic() - began


def end_session(session: int, signum: int = signal.SIGKILL) -> None:
    """Kill the remaining processes of a command."""
    for pid in processes_of_session(session):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
