"""Trials as jobs of a scheduler that is simulated by a script."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from app.process.status import RUNNING, begin_status, end_status
from app.run import job
from app.sweep import run_sweep, trials
from common.errors import UserError
from common.installation import ROOT
from tests.in_process import CommandResult, make_words, run_command
from tests.processes import wait_for
from tests.sweep.short_trials import TRIAL, results_in

COMMANDS = ("sbatch", "srun", "scancel", "scontrol")
SLOW_TRIAL = f"""
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
{TRIAL}
(folder / "config.yaml").write_text("")
time.sleep(0.1)
"""


def fake_command(module: str) -> list[str]:
    """Replace training by a short trial, which writes no status: then srun's exit code counts."""
    fakes = {"app.train": SLOW_TRIAL, "app.status": f"raise SystemExit({RUNNING})"}
    return [sys.executable, "-S", "-c", fakes[module]]


@pytest.fixture
def overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Overrides of a sweep on a machine where `sbatch` and related commands are scripts."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "jobs").mkdir()
    script = Path(__file__).with_name("scheduler.sh")
    for name in COMMANDS:
        (tmp_path / "bin" / name).write_text(script.read_text())
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("LOFT_JOBS", str(tmp_path / "jobs"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trials.SlurmLauncher, "poll_seconds", 0.1)
    monkeypatch.setattr(job, "child_command", fake_command)
    monkeypatch.setattr(trials, "TRAIN", ("-S", "-c", SLOW_TRIAL))
    return [*make_words(tmp_path), "launcher=slurm"]


def sweep(*overrides: str) -> CommandResult:
    return run_command("-m", *overrides, sweep=run_sweep)


def test_a_resumed_sweep_finds_its_running_jobs(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the first job runs: it is not submitted again."""
    start = trials.SlurmLauncher.start

    def interrupt(self: trials.SlurmLauncher, *args: Any) -> trials.SlurmJob:
        started = start(self, *args)
        os.kill(os.getpid(), signal.SIGINT)
        return started

    job_settings = ["launcher.partition=gpu", "launcher.minutes=90", "launcher.memory_gib=64"]
    with monkeypatch.context() as patch:
        patch.setattr(trials.SlurmLauncher, "start", interrupt)
        result = sweep(
            *overrides, *job_settings, "adapter.r=2,8", "trainer.devices=2", "output.dir=s"
        )
    assert result.code == 130
    assert "interrupted after 0 of 2 trials" in result.stderr and "scancel 1 " in result.stderr
    result = sweep("resume=s")
    assert result.code == 4, result.stderr  # exit code of the trial with r=8
    assert [row["exit_code"] for row in results_in("s")] == [0, 4]
    assert results_in("s")[1]["error"] == "error: loss is nan at step 3"
    assert len(list((tmp_path / "jobs").iterdir())) == 2
    batch_script = (tmp_path / "jobs/1/script").read_text()
    flags = ("partition=gpu", "time=90", "mem=64G", "gpus-per-node=2", "job-name=s-0", "requeue")
    for flag in (*flags, f"signal=USR1@{job.SIGNAL_SECONDS}", "ntasks-per-node=2"):
        assert f"#SBATCH --{flag}\n" in batch_script
    assert {row["seconds"] for row in json.loads(Path("s/sweep.json").read_text())} == {86407.0}


def test_jobs_that_a_folder_names_are_not_cancelled_nor_waited_for(
    overrides: list[str], tmp_path: Path
) -> None:
    """A received folder names job 1, which is another one of this user, and job 9 of nobody."""
    (tmp_path / "jobs/1").mkdir()
    script = f"#SBATCH --output={tmp_path}/mine/0.log\n"
    for name, text in (("script", script), ("state", "RUNNING"), ("step", "1"), ("code", "0")):
        (tmp_path / "jobs/1" / name).write_text(text)
    (tmp_path / "bin/scancel").write_text(f"#!/bin/bash\ntouch {tmp_path}/cancelled\n")
    (tmp_path / "s/slurm").mkdir(parents=True)
    words = [*overrides, "adapter.r=2,4"]
    (tmp_path / "s/sweep.yaml").write_text(f"words: {words}\n")
    named = tmp_path / "s/slurm/0.id"
    named.write_text("1\n")
    result = sweep("resume=s")
    assert result.code == 2, result.stderr
    assert "does not list job 1 as a job of yours that writes" in result.stderr
    shown = trials._show("1")
    trials.check_own_job("1", shown, tmp_path / "mine/0.log")
    with pytest.raises(UserError, match="job 1 as a job of yours"):
        trials.check_own_job("1", shown.replace("me(", "me(1"), tmp_path / "mine/0.log")
    named.write_text("all\n")
    result = sweep("resume=s")
    assert result.code == 2 and "is not the id of a job" in result.stderr, result.stderr
    named.write_text("9\n")  # which SLURM has forgotten, if it ever was
    assert sweep("resume=s").code == 0
    assert [row["exit_code"] for row in results_in("s")] == [0, 0]
    assert not (tmp_path / "cancelled").exists()


def test_a_job_that_was_kept_on_hold_is_let_go(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A sweep that is killed after its job is kept, and before it may start."""
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(trials, "_release", lambda number: (_ for _ in ()).throw(KeyboardInterrupt))
        run_sweep([*overrides, "adapter.r=2,4", "output.dir=s"])
    assert (tmp_path / "jobs/1/state").read_text() == "PENDING\n"
    assert sweep("resume=s").code == 0
    assert len(list((tmp_path / "jobs").iterdir())) == 2


@pytest.mark.slow
def test_a_search_with_jobs_equals_one_with_processes(overrides: list[str], tmp_path: Path) -> None:
    space = ["adapter.r=choice(2,4,16)", "optimizer.lr=interval(1e-5,1e-1)"]
    space += ["sweep.search=optuna", "sweep.trials=8", "sweep.prune=median"]
    for typed in ([*overrides[:2], "output.dir=local"], [*overrides, "output.dir=slurm"]):
        result = sweep(*typed, *space)
        assert result.code == 0, result.stderr
    assert len(list((tmp_path / "jobs").iterdir())) == 8
    found, expected = (
        [(row["overrides"], row["stopped_at"]) for row in results_in(name)]
        for name in ("slurm", "local")
    )
    assert found == expected and any(step for _, step in expected)


def test_a_trial_that_a_signal_ends_can_be_read(tmp_path: Path) -> None:
    """The kernel kills a trial that is out of memory, and -9 would not be an exit code."""
    folder, log = tmp_path / "0", tmp_path / "0.log"
    command = [sys.executable, "-S", "-c", "import os; os.kill(os.getpid(), 9)"]
    local = trials.LocalJob(command, folder, log, None)
    wait_for(lambda: local.poll() is not None)
    assert local.poll() == 137


@pytest.mark.parametrize(
    ("state", "exit_code", "code", "is_kept"),
    [
        ("COMPLETED", "0:0", 0, True),
        ("FAILED", "4:0", 4, True),
        ("FAILED", "143:0", 143, False),
        ("CANCELLED", "0:15", 143, False),
        ("FAILED", "137:0", 137, False),
        ("TIMEOUT", "0:0", 3, False),
        ("NODE_FAIL", "0:0", 3, False),
        ("OUT_OF_MEMORY", "0:125", 3, False),
        ("RUNNING", "0:0", None, True),
    ],
)
def test_what_is_made_of_the_end_of_a_job(
    state: str, exit_code: str, code: int | None, is_kept: bool, tmp_path: Path
) -> None:
    shown = f"   JobState={state} Reason=None\n   ExitCode={exit_code}\n   RunTime=00:01:02 T=1\n"
    names = (tmp_path / "0.id", tmp_path / "0", tmp_path / "0.log")
    assert trials.SlurmJob("7", *names).finds_result(shown) == is_kept
    with mock.patch.object(trials, "_show", lambda _: shown):
        polled = trials.SlurmJob("7", *names)
        assert [polled.poll(), polled.poll()] == [None, code]
    assert polled.seconds == (0.0 if code is None else 62.0)
    assert (polled.problem is not None) == (code in (3, 137))


def test_a_trial_whose_job_slurm_has_forgotten_has_the_code_of_its_status(tmp_path: Path) -> None:
    names = (tmp_path / "0.id", tmp_path / "0", tmp_path / "0.log")
    names[0].write_text("7\n")
    forgotten = "slurm_load_jobs error: Invalid job id specified"
    assert not trials.SlurmJob("7", *names).finds_result(forgotten)
    names[1].mkdir()
    begin_status(names[1], 0)
    assert not trials.SlurmJob("7", *names).finds_result(forgotten)
    end_status(names[1], "finished", 0)
    assert trials.SlurmJob("7", *names).finds_result(forgotten)
    os.utime(names[0], (time.time() + 60,) * 2)  # the status is of an earlier job
    assert not trials.SlurmJob("7", *names).finds_result(forgotten)


def test_a_machine_without_slurm_is_refused(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin" / "sbatch").unlink()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    result = sweep(*overrides, "adapter.r=2,4")
    assert result.code == 3 and "sbatch was not found" in result.stderr
    assert not (tmp_path / "outputs").exists()


def test_a_secret_is_not_written_into_the_script_of_a_job(
    overrides: list[str], tmp_path: Path
) -> None:
    url = "http://me:Zq7password@127.0.0.1:9/rows.jsonl"
    result = sweep(*overrides, "adapter.r=2,4", f"data.datasets=[{{path: '{url}'}}]")
    assert result.code == 2, result.stderr
    assert "launcher=local, or data that needs no secret" in result.stderr
    assert not (tmp_path / "outputs").exists()
