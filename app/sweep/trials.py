"""The trials of a sweep: starting their processes, watching them, and reading their results."""

from __future__ import annotations

import dataclasses
import math
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from app.config.overrides import quote_value
from app.process.launch import child_environment
from app.run.folder import CONFIG_FILE, METRICS_FILE
from app.training.run_documents import (
    CSV_FILE,
    METRICS,
    is_lower_better,
    read_curves,
    read_document,
)
from app.training.trainer import DEFAULT_MONITOR
from common.errors import DONE, TERMINATED
from common.files import open_no_follow
from common.installation import child_command
from common.redaction import redacted

TRAIN = tuple(child_command("app.train")[1:])
"""Python arguments that start a trial"""
_MAX_ERROR_LINES = 200
"""number of last lines of a trial's log that are searched for its error"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One finished run of a sweep and its result."""

    number: int
    overrides: list[str]
    """overrides of the trial, without secrets"""
    folder: str
    exit_code: int
    seconds: float
    objective: float | None
    """final value of `metric`; None if there is none"""
    error: str | None
    """error message of a failed trial"""
    stopped_at: int | None = None
    """step of the validation after which the trial was pruned; None if it was not"""
    metric: str = DEFAULT_MONITOR
    """metric of the validation by which trials are ranked"""

    @property
    def sort_key(self) -> tuple[bool, float, int]:
        """Key that sorts by objective, trials without a finite one last."""
        known = self.objective is not None and math.isfinite(self.objective)
        value = self.objective if known and self.objective is not None else 0.0
        return not known, value if is_lower_better(self.metric) else -value, self.number

    @property
    def has_failed(self) -> bool:
        """Whether it neither completed nor was pruned."""
        return self.exit_code != DONE and self.stopped_at is None


class Job(Protocol):
    """A running trial: a process on this machine or a cluster job."""

    id: str
    """id of the process or job"""
    problem: str | None
    """why the job ended, if the trial itself could not report it"""

    @property
    def seconds(self) -> float:
        """Run time in seconds."""

    def poll(self) -> int | None:
        """Return the trial's exit code; None while it is queued or running."""

    def send_signal(self, signum: signal.Signals) -> None:
        """Send a signal to the trial."""


def _start_process(
    command: Sequence[str], folder: Path, output: int, **environment: str
) -> subprocess.Popen[bytes]:
    """Start or resume the run of a trial; `environment` is added to that of this process.

    The trial gets its own session, so that signals reach it only if this process forwards them.
    """
    run_overrides = [f"output.dir={quote_value(str(folder))}"]
    if (folder / CONFIG_FILE).exists():  # an earlier process of this sweep started it
        run_overrides.append("resume=auto")
    return subprocess.Popen(
        [*command, *run_overrides],
        env=child_environment() | environment,  # the trial exits when this process does
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


class LocalJob:
    """A trial's process on this machine; `gpus` is its CUDA_VISIBLE_DEVICES, None to inherit it."""

    problem: str | None = None

    def __init__(self, command: Sequence[str], folder: Path, log: Path, gpus: str | None) -> None:
        self._started = time.monotonic()
        environment = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}
        with open_no_follow(log, "ab") as output:
            self._process = _start_process(command, folder, output.fileno(), **environment)
        self.id = str(self._process.pid)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def poll(self) -> int | None:
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code  # as shells count a signal

    def send_signal(self, signum: signal.Signals) -> None:
        self._process.send_signal(signum)


class Launcher(Protocol):
    """Starts trials on this machine or a cluster."""

    num_slots: int
    """number of trials that run at the same time"""
    poll_seconds: float
    """interval between two checks of the running trials, in seconds"""
    jobs_outlive_sweep: bool
    """whether running trials continue after the sweep's process has ended"""

    def start(self, slot: int, overrides: Sequence[str], folder: Path, log: Path) -> Job:
        """Start a trial in a free slot."""


class LocalLauncher:
    """Runs trials as processes on this machine.

    Args:
        slots: CUDA_VISIBLE_DEVICES of each slot, None to inherit it.
    """

    poll_seconds = 0.2
    jobs_outlive_sweep = False

    def __init__(self, slots: Sequence[str | None]) -> None:
        self._slots = slots
        self.num_slots = len(slots)

    def start(self, slot: int, overrides: Sequence[str], folder: Path, log: Path) -> LocalJob:
        """Start a process that sees only the GPUs of its slot."""
        command = [sys.executable, *TRAIN, *overrides]
        return LocalJob(command, folder, log, self._slots[slot])


class RunningTrial:
    """A started trial; its output is logged to NUMBER.log in the sweep's folder.

    Args:
        overrides: overrides of the trial, except for output.dir.
        folder: the sweep's folder.
        metric: what trials are ranked by.
    """

    def __init__(
        self,
        number: int,
        overrides: list[str],
        folder: Path,
        slot: int,
        launcher: Launcher,
        metric: str,
    ) -> None:
        self.number, self.overrides, self.metric = number, overrides, metric
        self.folder = folder / str(number)
        self.log = folder / f"{number}.log"
        self.stopped_at: int | None = None
        self._is_signalled = False
        self.job = launcher.start(slot, overrides, self.folder, self.log)

    def prune(self, step: int) -> None:
        """Stop the trial, which saves a checkpoint, because others are better at `step`."""
        self.stopped_at = step
        self.send_signal_once(signal.SIGTERM)

    def send_signal_once(self, signum: signal.Signals) -> None:
        """Send a signal, at most once: a second one would end the trial without a checkpoint."""
        if not self._is_signalled:
            self._is_signalled = True
            self.job.send_signal(signum)

    def result(self) -> Trial:
        """Return the result of a trial that has ended."""
        code = self.job.poll()
        assert code is not None, "the trial is still running"
        if self.stopped_at is not None and code in (DONE, TERMINATED):
            # Later steps are ignored: how many there are depends on the speed of the machine.
            curve = read_curve(self.folder, self.metric)
            until_pruned = [value for step, value in curve.items() if step <= self.stopped_at]
            best = min if is_lower_better(self.metric) else max
            objective, error, code = best(until_pruned, default=None), None, TERMINATED
        else:
            objective = read_final(self.folder, self.metric) if code == DONE else None
            reason = self.job.problem or _find_error(self.log) or f"exit code {code}"
            error = None if code == DONE else reason
        return Trial(
            number=self.number,
            overrides=redacted(self.overrides),
            folder=str(self.folder),
            exit_code=code,
            seconds=round(self.job.seconds, 1),
            objective=objective,
            error=error,
            stopped_at=self.stopped_at,
            metric=self.metric,
        )


def read_curve(folder: Path, metric: str) -> dict[int, float]:
    """Return a metric of a run's validations by step, without step 0."""
    rows = read_curves(folder / CSV_FILE)
    return {step: row[metric] for step, row in rows if metric in row and step > 0}


def read_final(folder: Path, metric: str) -> float | None:
    """Return a metric of a finished run; None if it was not measured."""
    file = folder / METRICS_FILE
    if not file.exists():
        return None
    value: float | None = read_document(file, METRICS).get(metric)
    return value


def _find_error(log: Path) -> str | None:
    """Return the last line of a log that starts with "error", or else its last non-empty line."""
    if not log.exists():  # the job never started
        return None
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_MAX_ERROR_LINES:]
    errors = [line.strip() for line in lines if line.startswith("error")]
    return errors[-1] if errors else next((line for line in reversed(lines) if line.strip()), None)
