from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from app.sweep import run_sweep
from common.installation import ROOT
from tests.in_process import CommandResult, make_words, run_command
from tests.sweep.short_trials import TRIAL, results_in, short_trials
from tests.sweep.test_sweep import PAIRS, RATED

pytest.importorskip("optuna")
SPACE = ["adapter.r=choice(2,4,16)", "optimizer.lr=interval(1e-5,1e-1)", "sweep.search=optuna"]
RUN_SWEEP = """
import sys
from app.sweep import run_sweep
from tests.sweep.short_trials import TRIAL, short_trials
waits = "import sys, time\\nif 'output.dir=killed/5' in sys.argv: time.sleep(600)\\n"
with short_trials(waits + TRIAL):
    run_sweep(sys.argv[1:])
"""
"""a sweep whose sixth trial does not end"""


@pytest.fixture
def overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    return [*make_words(tmp_path), *SPACE]


def search(*overrides: str) -> CommandResult:
    with short_trials(TRIAL):
        return run_command("-m", *overrides, sweep=run_sweep)


@pytest.mark.slow
def test_a_killed_search_resumes_as_if_never_killed(overrides: list[str], tmp_path: Path) -> None:
    arguments = [*overrides, "sweep.trials=10", "sweep.prune=median"]
    result = search(*arguments, "output.dir=whole")
    assert result.code == 0, result.stderr
    command = [sys.executable, "-c", RUN_SWEEP, *arguments, "output.dir=killed"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(b"[5/10]"):
                process.send_signal(signal.SIGKILL)
                break
    assert len(results_in(tmp_path / "killed")) == 5
    lock = tmp_path / "killed/optuna.log.lock"
    if not lock.is_symlink():  # it was not killed while writing its journal
        lock.symlink_to("killed/optuna.log")
    result = search("resume=killed")
    assert result.code == 0, result.stderr
    whole = results_in(tmp_path / "whole")
    assert results_in(tmp_path / "killed") == whole
    assert len(whole) == 10
    stopped = [row for row in whole if row["stopped_at"] is not None]
    # The step at which it was pruned, although these trials had already reached their end.
    assert {(row["stopped_at"], row["exit_code"]) for row in stopped} == {(2, 143)}
    assert 0 < len(stopped) < 8
    # The first trial has the default settings, and the best one is no worse.
    assert whole[0]["overrides"][-2:] == ["adapter.r=16", "optimizer.lr=0.0002"]
    best = min(whole, key=lambda row: row["objective"])
    assert best["objective"] <= whole[0]["objective"]


def test_a_search_for_beta_raises_the_accuracy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*make_words(tmp_path), *PAIRS, "objective=dpo", "sweep.search=optuna"]
    words += ["objective.beta=interval(0.05,0.5)", "sweep.trials=8", "output.dir=found"]
    with short_trials(RATED):
        result = run_command("-m", *words, sweep=run_sweep)
    assert result.code == 0, result.stderr
    rows = results_in(Path("found"))
    best = max(rows, key=lambda row: row["objective"])  # the first trial has the default beta
    assert best["metric"] == "val/accuracy" and best["objective"] > rows[0]["objective"]
    assert f"-> found/{best['number']}\n  highest val/accuracy" in result.stdout


def test_trials_run_in_parallel(overrides: list[str], tmp_path: Path) -> None:
    """Each trial waits until all of them have started."""
    started = tmp_path / "started"
    started.mkdir()
    together = f"""
import os, pathlib, time
started = pathlib.Path({str(started)!r})
(started / str(os.getpid())).touch()
until = time.monotonic() + 60
while len(list(started.iterdir())) < 4 and time.monotonic() < until:
    time.sleep(0.01)
assert time.monotonic() < until
"""
    with short_trials(together + TRIAL):
        result = run_command(
            "-m", *overrides, "sweep.trials=4", "sweep.parallel=4", "output.dir=s", sweep=run_sweep
        )
    assert result.code == 0, result.stderr
    assert len(results_in(tmp_path / "s")) == 4
