"""The trials of a sweep: started in slots, watched, and read when they end."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from app.config.overrides import quote_value
from app.process.errors import DONE, TERMINATED
from app.process.launch import PARENT_VARIABLE, VARIABLES_OF_A_RANK
from app.run.folder import CONFIG_FILE, METRICS_FILE
from data_modules import redacted

OBJECTIVE = "val/loss"
CURVE_FILE = "metrics.csv"
TRAIN = ("-m", "app.train")
"""what a trial runs, as arguments of Python"""
MAX_ERROR_LINES = 200
"""last lines of a trial's output among which its error is looked for"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One run of a sweep, and what became of it."""

    number: int
    overrides: list[str]
    """what it was started with, without secrets"""
    folder: str
    exit_code: int
    seconds: float
    objective: float | None
    """the final validation loss; None where the trial has none"""
    error: str | None
    stopped_at: int | None = None
    """step of the validation after which it was stopped, since others were better there"""

    @property
    def rank(self) -> tuple[bool, float, int]:
        """Sort by objective, trials without one last."""
        known = self.objective is not None and math.isfinite(self.objective)
        value = self.objective if known and self.objective is not None else 0.0
        return not known, value, self.number

    @property
    def has_failed(self) -> bool:
        """Whether it ended neither by itself nor because others were better."""
        return self.exit_code != DONE and self.stopped_at is None


class Job(Protocol):
    """What runs a trial: a process of this machine, or a job of a cluster."""

    id: str
    """of the process, or the job"""
    problem: str | None
    """why it ended, where the trial itself could not say"""

    @property
    def seconds(self) -> float:
        """Return how long it ran."""

    def poll(self) -> int | None:
        """Return the trial's exit code; None while it runs, or waits to."""

    def send_signal(self, signum: signal.Signals) -> None:
        """Pass a signal on to the trial."""


def start_process(
    command: Sequence[str], folder: Path, output: int, **environment: str
) -> subprocess.Popen[bytes]:
    """Start the training of a trial, or go on with it; `environment` is added to this one's.

    In a session of its own: a signal to this process's group is this process's to pass on.
    """
    where = [f"output.dir={quote_value(str(folder))}"]
    if (folder / CONFIG_FILE).exists():  # started before the sweep was killed
        where.append("resume=auto")
    own = {k: v for k, v in os.environ.items() if k not in VARIABLES_OF_A_RANK}
    own[PARENT_VARIABLE] = str(os.getpid())  # it ends with this process
    return subprocess.Popen(
        [*command, *where],
        env=own | environment,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


class LocalJob:
    """A trial's process; `gpus` are its CUDA_VISIBLE_DEVICES."""

    problem: str | None = None

    def __init__(self, command: Sequence[str], folder: Path, log: Path, gpus: str | None) -> None:
        self._started = time.monotonic()
        own = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}
        with log.open("ab") as output:
            self._process = start_process(command, folder, output.fileno(), **own)
        self.id = str(self._process.pid)

    @property
    def seconds(self) -> float:
        """Return how long it has run."""
        return time.monotonic() - self._started

    def poll(self) -> int | None:
        """Return its exit code; None while it runs."""
        return self._process.poll()

    def send_signal(self, signum: signal.Signals) -> None:
        """Pass a signal on."""
        self._process.send_signal(signum)


class Launcher(Protocol):
    """Where trials run."""

    num_slots: int
    """trials at a time"""
    poll_seconds: float
    """between two looks at what runs"""
    outlives_sweep: bool
    """whether what runs goes on without the sweep"""

    def start(self, slot: int, command: Sequence[str], folder: Path, log: Path) -> Job:
        """Start a trial in a free slot."""


class Local:
    """Runs trials as processes of this machine.

    Args:
        slots: indices for CUDA_VISIBLE_DEVICES, None where trials do not share GPUs out.
    """

    poll_seconds = 0.2
    outlives_sweep = False

    def __init__(self, slots: Sequence[str | None]) -> None:
        self._slots = slots
        self.num_slots = len(slots)

    def start(self, slot: int, command: Sequence[str], folder: Path, log: Path) -> LocalJob:
        """Start a process that sees the GPUs of its slot."""
        return LocalJob(command, folder, log, self._slots[slot])


class RunningTrial:
    """A trial that runs; its output goes to a file beside its folder.

    Args:
        words: what it runs with, besides its folder.
        folder: the sweep's.
    """

    def __init__(
        self, number: int, words: list[str], folder: Path, slot: int, launcher: Launcher
    ) -> None:
        self.number, self.words = number, words
        self.folder = folder / str(number)
        self.log = folder / f"{number}.log"
        self.stopped_at: int | None = None
        self._is_signalled = False
        command = [sys.executable, *TRAIN, *words]
        self.job = launcher.start(slot, command, self.folder, self.log)

    @property
    def has_ended(self) -> bool:
        """Whether it has ended."""
        return self.job.poll() is not None

    def curve(self) -> dict[int, float]:
        """Return the validation losses so far by step, without that of the untrained model."""
        return read_curve(self.folder)

    def stop(self, step: int) -> None:
        """Have it save itself and end, since others are better at `step`."""
        self.stopped_at = step
        self.end_by(signal.SIGTERM)

    def end_by(self, signum: signal.Signals) -> None:
        """Pass a signal on, once: a second one would not let it save itself."""
        if not self._is_signalled:
            self._is_signalled = True
            self.job.send_signal(signum)

    def result(self) -> Trial:
        """Return what became of it when it has ended."""
        code = self.job.poll()
        assert code is not None, "it has ended"
        code = code if code >= 0 else 128 - code
        if self.stopped_at is not None and code in (DONE, TERMINATED):
            # As far as it was judged: how much further it came is the machine's pace.
            judged = (value for step, value in self.curve().items() if step <= self.stopped_at)
            objective, error, code = min(judged, default=None), None, TERMINATED
        else:
            objective = read_objective(self.folder) if code == DONE else None
            known = self.job.problem or _error_in(self.log) or f"exit code {code}"
            error = None if code == DONE else known
        return Trial(
            number=self.number,
            overrides=redacted(self.words),
            folder=str(self.folder),
            exit_code=code,
            seconds=round(self.job.seconds, 1),
            objective=objective,
            error=error,
            stopped_at=self.stopped_at,
        )


def read_curve(folder: Path) -> dict[int, float]:
    """Return a run's validation losses by step, those before the first step left out."""
    file = folder / CURVE_FILE
    if not file.is_file():
        return {}
    with file.open(encoding="utf-8", newline="") as rows:
        whole = (line for line in rows if line.endswith("\n"))  # the last may be half written
        found = [(row["step"], row.get(OBJECTIVE)) for row in csv.DictReader(whole)]
    return {int(step): float(value) for step, value in found if value and int(step) > 0}


def read_objective(folder: Path) -> float | None:
    """Return a finished run's validation loss; None where it has none."""
    file = folder / METRICS_FILE
    if not file.exists():
        return None
    value = json.loads(file.read_text(encoding="utf-8")).get(OBJECTIVE)
    return None if value is None else float(value)


def _error_in(log: Path) -> str | None:
    """Return the first line of a message that a trial ended with, else its last line."""
    if not log.exists():  # of a job that never began
        return None
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-MAX_ERROR_LINES:]
    errors = [line.strip() for line in lines if line.startswith("error")]
    return errors[-1] if errors else next((one for one in reversed(lines) if one.strip()), None)
