"""Trials of milliseconds in place of trainings: a curve that follows from their settings."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

TRIAL = """
import json, math, pathlib, sys
words = dict(word.split("=", 1) for word in sys.argv[1:])
if words["adapter.r"] == "8":
    print("error: loss is nan at step 3\\n  a hint", file=sys.stderr)
    sys.exit(4)
folder = pathlib.Path(words["output.dir"].strip("'"))
folder.mkdir(parents=True, exist_ok=True)
loss = 1 / float(words["adapter.r"])
if "optimizer.lr" in words:
    loss += abs(math.log10(float(words["optimizer.lr"])) + 3)
with open(folder / "metrics.csv", "w") as file:
    file.write("step,train/loss,val/loss\\n0,,9.0\\n")
    for step in (2, 4, 6):
        file.write(f"{step},1.0,{loss + 1 / step}\\n")
(folder / "metrics.json").write_text(json.dumps({"val/loss": loss + 1 / 6}))
"""
OF_A_GRID = TRIAL.replace(" + 1 / 6}", "}")


@contextlib.contextmanager
def short_trials(
    script: str = OF_A_GRID, *, interrupt_at: int | None = None
) -> Iterator[list[list[str]]]:
    """Start `script` where a sweep starts a training; yields the commands.

    `interrupt_at`: the trial during which Ctrl-C is pressed.
    """
    typed: list[list[str]] = []
    real = subprocess.Popen

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        assert command[:3] == [sys.executable, "-m", "app.train"]
        typed.append(command[3:])
        code = script
        if len(typed) - 1 == interrupt_at:
            code = "import time; time.sleep(60)"
            os.kill(os.getpid(), signal.SIGINT)
        return real([sys.executable, "-S", "-c", code, *command[3:]], **options)

    with mock.patch("app.sweep.trials.subprocess.Popen", start):
        yield typed
