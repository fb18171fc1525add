"""Trials of milliseconds, whose loss curve is computed from their settings."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from common.installation import child_command

TRIAL = """
import json, math, pathlib, sys
values = dict(word.split("=", 1) for word in sys.argv[1:])
if values["adapter.r"] == "8":
    print("error: loss is nan at step 3\\n  a hint", file=sys.stderr)
    sys.exit(4)
folder = pathlib.Path(values["output.dir"].strip("'"))
folder.mkdir(parents=True, exist_ok=True)
loss = 1 / float(values["adapter.r"])
if "optimizer.lr" in values:
    loss += abs(math.log10(float(values["optimizer.lr"])) + 3)
with open(folder / "metrics.csv", "w") as file:
    file.write("step,train/loss,val/loss\\n0,,9.0\\n")
    for step in (2, 4, 6):
        file.write(f"{step},1.0,{loss + 1 / step}\\n")
(folder / "metrics.json").write_text(json.dumps({"val/loss": loss + 1 / 6}))
"""
GRID_TRIAL = TRIAL.replace(" + 1 / 6}", "}")


@contextlib.contextmanager
def short_trials(
    script: str = GRID_TRIAL, *, interrupt_at: int | None = None
) -> Iterator[list[list[str]]]:
    """Run `script` in place of the training of each trial; yield the trials' overrides.

    `interrupt_at` is the number of the trial during which the sweep receives SIGINT.
    """
    commands: list[list[str]] = []
    real = subprocess.Popen

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        assert command[:4] == child_command("app.train")
        assert options["start_new_session"]  # Ctrl-C reaches it only through the sweep
        assert not {"NODE_RANK", "MASTER_PORT", "LOFT_RUN_DIR"} & set(options["env"])
        commands.append(command[4:])
        code = script
        if len(commands) - 1 == interrupt_at:
            code = "import time; time.sleep(60)"
            os.kill(os.getpid(), signal.SIGINT)
        return real([sys.executable, "-S", "-c", code, *command[4:]], **options)

    with mock.patch("app.sweep.trials.subprocess.Popen", start):
        yield commands


def results_in(folder: Path | str) -> list[dict[str, Any]]:
    """Return the results of a sweep's trials, without what differs between two equal sweeps."""
    rows = json.loads(Path(folder, "sweep.json").read_text())
    kept = ({k: v for k, v in row.items() if k not in ("seconds", "folder")} for row in rows)
    return sorted(kept, key=lambda row: row["number"])
