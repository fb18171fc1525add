"""The trials of a sweep as processes: started in slots, watched, and read when they end."""

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
from pathlib import Path
from typing import IO

from app.config.overrides import quote_value
from app.process.errors import DONE, TERMINATED
from app.process.launch import PARENT_VARIABLE, VARIABLES_OF_A_RANK
from app.run.folder import CONFIG_FILE, METRICS_FILE
from data_modules import redacted

OBJECTIVE = "val/loss"
CURVE_FILE = "metrics.csv"
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


class RunningTrial:
    """A trial's process; its output goes to a file beside its folder.

    Args:
        words: what it runs with, besides its folder.
        gpus: indices for CUDA_VISIBLE_DEVICES, None where trials do not share GPUs out.
    """

    def __init__(self, number: int, words: list[str], folder: Path, gpus: str | None) -> None:
        self.number, self.words = number, words
        self.folder = folder / str(number)
        self.log = folder / f"{number}.log"
        self.stopped_at: int | None = None
        self._is_told = False
        environment = {k: v for k, v in os.environ.items() if k not in VARIABLES_OF_A_RANK}
        environment[PARENT_VARIABLE] = str(os.getpid())  # a trial ends with its sweep
        if gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpus
        where = [f"output.dir={quote_value(str(self.folder))}"]
        if (self.folder / CONFIG_FILE).exists():  # begun before the sweep was killed
            where.append("resume=auto")
        command = [sys.executable, "-m", "app.train", *words, *where]
        self._started = time.monotonic()
        self._output: IO[bytes] = self.log.open("ab")
        self.process = subprocess.Popen(
            command, env=environment, stdout=self._output, stderr=subprocess.STDOUT
        )

    @property
    def has_ended(self) -> bool:
        """Whether its process has ended."""
        return self.process.poll() is not None

    def curve(self) -> dict[int, float]:
        """Return the validation losses so far by step, without that of the untrained model."""
        return read_curve(self.folder)

    def stop(self) -> None:
        """Have it save itself and end, since others are better."""
        self.stopped_at = max(self.curve(), default=0)
        self.end_by(signal.SIGTERM)

    def end_by(self, signum: signal.Signals) -> None:
        """Pass a signal on, once: a second one would not let it save itself."""
        if not self._is_told:
            self._is_told = True
            self.process.send_signal(signum)

    def result(self) -> Trial:
        """Wait for its end and return what became of it."""
        code = self.process.wait()
        self._output.close()
        code = code if code >= 0 else 128 - code
        if self.stopped_at is not None and code in (DONE, TERMINATED):
            objective = min(self.curve().values(), default=None)
            error = None
        else:
            objective = read_objective(self.folder) if code == DONE else None
            error = None if code == DONE else _error_in(self.log) or f"exit code {code}"
        return Trial(
            number=self.number,
            overrides=redacted(self.words),
            folder=str(self.folder),
            exit_code=code,
            seconds=round(time.monotonic() - self._started, 1),
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
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-MAX_ERROR_LINES:]
    errors = [line.strip() for line in lines if line.startswith("error")]
    return errors[-1] if errors else next((one for one in reversed(lines) if one.strip()), None)
