"""Run the verbs in separate processes, and find the processes of a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from app.process.launch import RANK_VARIABLES
from tests.conftest import ROOT
from tests.tiny import small_run

RUN = (
    "trainer.max_steps=8",
    "trainer.validate_every_steps=3",
    "trainer.checkpoint.every_steps=2",
    "evaluation.exact_match=false",
    "adapter.dropout=0.1",
    "logger=csv",
)
"""overrides of a run of eight steps with validations, checkpoints and an epoch's end"""
TWO_RANKS = ("trainer.devices=2", "trainer.accelerator=cpu")
LONGEST = 600.0
"""time limit of a process in seconds, on a busy machine"""
AT_ONCE = 4.0
"""limit in seconds for a process that ends at once, not after a save or a grace period"""
GONE_WITHIN = 15.0
"""seconds after the end of a run within which all its processes must be gone"""


class Started(NamedTuple):
    """A process of a verb, and the printed line that showed that it was ready."""

    process: subprocess.Popen[str]
    line: str


def ends_within() -> float:
    """Return the limit of seconds from SIGTERM to the end of a process with nothing to save.

    It grows with the load of the machine, but stays below the time that a hanging process takes.
    """
    return min(25.0, 5.0 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


def user_environment() -> dict[str, str]:
    """Return this process's environment without the variables of a rank."""
    return {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}


def run(*words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; `options` as for `subprocess.run`."""
    plain: dict[str, Any] = {"capture_output": True, "text": True, "check": False}
    return subprocess.run(words, **{"cwd": ROOT, "timeout": LONGEST, **plain, **options})


def start(
    *command: str, environment: Mapping[str, str | None] | None = None, **options: Any
) -> subprocess.Popen[str]:
    """Start a program in a new session; None removes a variable from the environment.

    `options` as for `subprocess.Popen`.
    """
    with_stacks = {"PYTHONFAULTHANDLER": "1"}  # stacks of a process that takes too long
    changed = user_environment() | with_stacks | dict(environment or {})
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        command,
        env={name: value for name, value in changed.items() if value is not None},
        text=True,
        start_new_session=True,
        # As in a terminal: background jobs of a shell ignore SIGINT, as would the run.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **{"cwd": ROOT, **pipes, **options},
    )


def start_train(*words: str, python: str = sys.executable, **options: Any) -> subprocess.Popen[str]:
    """Start `python -m app.train`; `options` as for `start`."""
    return start(python, "-m", "app.train", *words, **options)


def type_train(
    folder: Path, *words: str, environment: Mapping[str, str | None] | None = None, **options: Any
) -> tuple[int, str, str]:
    """Train a small run into `folder`; return its exit code, output and error output.

    Nothing of it may be left.
    """
    typed = [*small_run(*RUN, *words), f"output.dir={folder}"]
    process = start_train(*typed, environment=environment, **options)
    try:
        printed, errors = process.communicate(timeout=LONGEST)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)
        printed, errors = process.communicate()
    wait_until_gone(folder)
    return process.returncode, printed, errors


def processes_of(folder: Path) -> list[int]:
    """Return the processes with a run's folder in their command: launcher, ranks, workers."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if any(str(folder).encode() in word for word in words):
                found.append(int(entry.name))
    return sorted(found)


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(one) for file in files for one in file.read_text().split()]


def wait_for(condition: Callable[[], object], seconds: float = LONGEST) -> None:
    """Wait until a condition holds."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds
        time.sleep(0.01)


def wait_until_gone(folder: Path, seconds: float = GONE_WITHIN) -> float:
    """Wait until no process of a run is left; return the seconds that it took."""
    began = time.monotonic()
    while left := processes_of(folder):
        assert time.monotonic() - began < seconds, f"{left} are left of {folder}"
        time.sleep(0.05)
    return time.monotonic() - began


@contextmanager
def started(python: str, verb: str, *words: str, until: str, **variables: str) -> Iterator[Started]:
    """Start a verb and wait for a line that contains `until`; kill it at the end."""
    environment = {"PYTHONUNBUFFERED": "1", **variables}
    command = (python, "-m", f"app.{verb}", *words)
    process = start(*command, environment=environment, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if until in line:
                break
        assert lines and until in lines[-1], "".join(lines)
        yield Started(process, lines[-1])
    finally:
        process.kill()
        process.wait()


def run_verb(verb: str, *words: str, lines: str = "", python: str = sys.executable) -> str:
    """Run a verb with `lines` as its standard input; return its output."""
    environment = {name: value for name, value in os.environ.items() if name != "LOFT_RUN_DIR"}
    done = run(python, "-m", f"app.{verb}", *words, env=environment, input=lines)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
