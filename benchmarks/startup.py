"""Start-up times: `--help`, a config error, the first optimizer step.

Each is compared with bare imports of the heavy libraries, measured alternately so that both see the
same machine. Validation before the first step is left out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.bare_imports import seconds_to_import
from benchmarks.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
REPEATS = 5
NOTE_VARIABLE = "LOFT_BENCHMARK_NOTE"

# Importing lightning a little sooner than the verb does costs the same; its Trainer then takes one
# more callback, which notes the times and ends the process at the first step.
WATCHED_TRAIN = f"""
import json, os, runpy, sys, time
from pathlib import Path
import lightning as L

class Watch(L.Callback):
    validation = 0.0
    def on_sanity_check_start(self, *_):
        self.began = time.time()
    def on_sanity_check_end(self, *_):
        self.validation = time.time() - self.began
    def on_train_batch_end(self, *_):
        note = {{"first_step": time.time(), "validation_seconds": self.validation}}
        Path(os.environ["{NOTE_VARIABLE}"]).write_text(json.dumps(note))
        os._exit(0)

plain = L.Trainer.__init__
def with_watch(self, **options):
    plain(self, **options | {{"callbacks": [*options["callbacks"], Watch()]}})
L.Trainer.__init__ = with_watch
runpy.run_module("app.train", run_name="__main__", alter_sys=True)
"""


def measure() -> list[Figure]:
    """Measure the three times, each relative to the bare imports of the same round."""
    mistake = ("-m", "app.train", "+experiment=quickstart", "trainer.max_stepz=3")
    seconds_to_import()  # reads the libraries from disk once
    rounds = []
    for _ in range(REPEATS):
        bare = seconds_to_import()
        rounds.append(
            (
                bare,
                _seconds("-m", "app.train", "--help"),
                _seconds(*mistake, exit_code=2),
                _seconds_to_first_step() - bare,
            )
        )
    bare, *waits = (median(column) for column in zip(*rounds, strict=True))
    print(f"bare imports {bare:.2f} s; " + ", ".join(f"{wait:.2f} s" for wait in waits))
    shares = [median(row[wait] / row[0] for row in rounds) for wait in (1, 2, 3)]
    return [
        Figure(figure="startup/help_of_bare_imports", value=shares[0], bar=0.2),
        Figure(figure="startup/config_error_of_bare_imports", value=shares[1], bar=0.3),
        Figure(figure="startup/first_step_above_bare_imports", value=shares[2], bar=0.4),
    ]


def _seconds(*arguments: str, exit_code: int = 0, note: Path | None = None) -> float:
    environment = os.environ | ({NOTE_VARIABLE: str(note)} if note else {})
    started = time.time()
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.time() - started
    if done.returncode != exit_code:
        raise SystemExit(f"{' '.join(arguments[:2])} ended with {done.returncode}:\n{done.stderr}")
    return seconds


def _seconds_to_first_step() -> float:
    """Return the seconds from the command to the end of the first step, without validation."""
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder) / "note.json"
        words = ("+experiment=quickstart", "trainer.max_steps=5", f"output.dir={folder}/run")
        started = time.time()
        _seconds("-c", WATCHED_TRAIN, *words, note=note)
        times = json.loads(note.read_text())
    return float(times["first_step"] - started - times["validation_seconds"])
