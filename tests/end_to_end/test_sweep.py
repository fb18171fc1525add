from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from common.installation import ROOT
from tests.processes import run
from tests.reliability.shell import Shell
from tests.runs import rows_of
from tests.tiny import small_run

pytestmark = pytest.mark.slow


def test_a_sweep_runs_trials_with_two_ranks(shell: Shell, tmp_path: Path) -> None:
    """Ranks are started with the same command line, but must not start another sweep."""
    words = small_run("trainer.max_steps=2", "trainer.devices=2", "strategy=ddp")
    words += ["adapter.r=4,8", "evaluation.exact_match=false", "output.dir=sweep"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = (shell.python, "-m", "app.train", "-m", *words)
    done = run(*command, cwd=tmp_path, env=environment, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    trials = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert len(trials) == 2
    assert all(trial["objective"] > 0 for trial in trials)
    assert len({tuple(trial["overrides"]) for trial in trials}) == 2
    for trial in trials:
        assert rows_of(tmp_path / trial["folder"])[-1]["step"] == "2"
    left = {path.name for path in (tmp_path / "sweep").iterdir()}
    files = {"sweep.json", "sweep.csv", "sweep.html", "sweep.yaml", "run.lock"}
    assert left == files | {"0", "1", "0.log", "1.log"}
    assert done.stdout.strip().splitlines()[-1] == "run: sweep"
