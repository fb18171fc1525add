"""Trials as jobs of a scheduler simulated by a script, and of submitit's local executor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.sweep import run_sweep, slurm, trials
from common.errors import UserError
from common.installation import ROOT
from tests.in_process import CommandResult, make_words, run_command
from tests.sweep.short_trials import TRIAL

pytest.importorskip("submitit")
URL = "http://me:Zq7password@127.0.0.1:9/rows.jsonl"
COMMANDS = ("sbatch", "srun", "sacct", "scancel", "scontrol")
SLOW_TRIAL = f"""
import signal, time
signal.signal(signal.SIGTERM, lambda *_: exit(143))
{TRIAL}
(folder / "config.yaml").write_text("")
time.sleep(0.5)
"""
RESUMABLE_TRIAL = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
(folder,) = (word.split("=", 1)[1] for word in sys.argv if word.startswith("output.dir="))
folder = pathlib.Path(folder.strip("'"))
folder.mkdir(exist_ok=True)
(folder / "config.yaml").write_text("")
if "resume=auto" not in sys.argv:
    try:
        (folder / "started").touch()
        time.sleep(60)
    finally:
        (folder / "saved").touch()
"""
RUN_SWEEP = """
import sys
from app.sweep import run_sweep, trials
trials.TRAIN = ("-S", "-c", sys.argv[1])
run_sweep(sys.argv[2:])
"""


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
    monkeypatch.setattr(slurm.SlurmLauncher, "poll_seconds", 0.1)
    monkeypatch.setattr(trials, "TRAIN", ("-S", "-c", SLOW_TRIAL))
    return [*make_words(tmp_path), "launcher=slurm"]


def sweep(*overrides: str) -> CommandResult:
    return run_command("-m", *overrides, sweep=run_sweep)


def results_in(folder: str) -> list[dict[str, Any]]:
    read = json.loads(Path(folder, "sweep.json").read_text())
    return [
        {name: value for name, value in row.items() if name not in ("seconds", "folder")}
        for row in sorted(read, key=lambda row: row["number"])
    ]


def wait_for(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_resumed_sweep_finds_its_running_jobs(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the first job runs: it is not submitted again."""
    start = slurm.SlurmLauncher.start

    def interrupt(self: slurm.SlurmLauncher, *args: Any) -> slurm.SlurmJob:
        job = start(self, *args)
        os.kill(os.getpid(), signal.SIGINT)
        return job

    job_settings = ["launcher.partition=gpu", "launcher.minutes=90", "launcher.memory_gib=64"]
    with monkeypatch.context() as patch:
        patch.setattr(slurm.SlurmLauncher, "start", interrupt)
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
    for flag in ("partition=gpu", "time=90", "mem=64GB", "gpus-per-node=2", "job-name=loft-s-0"):
        assert f"#SBATCH --{flag}\n" in batch_script


def test_jobs_that_a_folder_names_are_not_cancelled_nor_waited_for(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A received folder names job 1, which is another one of this user, and job 9 of nobody."""
    (tmp_path / "jobs/1").mkdir()
    (tmp_path / "jobs/1/script").write_text(f"#SBATCH --output={tmp_path}/mine/%j_%t_log.out\n")
    (tmp_path / "jobs/1/state").write_text("RUNNING")
    (tmp_path / "jobs/1/step").write_text("1")
    (tmp_path / "bin/scancel").write_text(f"#!/bin/bash\ntouch {tmp_path}/cancelled\n")
    (tmp_path / "s").mkdir()
    words = [*overrides, "adapter.r=2,4"]
    (tmp_path / "s/sweep.yaml").write_text(f"words: {words}\n")
    for number in (1, 9):
        named = tmp_path / f"s/slurm/0/{number}_submitted.pkl"
        named.parent.mkdir(parents=True, exist_ok=True)
        named.write_bytes(b"never read")
        result = sweep("resume=s")
        assert result.code == 2, result.stderr
        assert f"does not list job {number} as a job of yours that writes" in result.stderr
        named.unlink()
    submitted = subprocess.run(["id", "-u"], capture_output=True, text=True, check=True).stdout
    script = tmp_path / "bin/scontrol"
    script.write_text(script.read_text().replace("$(id -u)", str(int(submitted) + 1)))
    with pytest.raises(UserError, match="job 1 as a job of yours"):
        slurm.check_job_folder("1", tmp_path / "mine")
    script.write_text(script.read_text().replace(f"me({int(submitted) + 1})", "me($(id -u))"))
    slurm.check_job_folder("1", tmp_path / "mine")
    assert not (tmp_path / "cancelled").exists()


@pytest.mark.slow
def test_a_cancelled_trial_is_submitted_again(overrides: list[str], tmp_path: Path) -> None:
    result = sweep(*overrides, "adapter.r=2,4", "output.dir=s")
    assert result.code == 0, result.stderr
    end = tmp_path / "s/slurm/1/end.json"
    end.write_text(json.dumps({"exit_code": 143, "seconds": 1.0}))
    results = json.loads((tmp_path / "s/sweep.json").read_text())
    (tmp_path / "s/sweep.json").write_text(
        json.dumps([row for row in results if row["number"] == 0])
    )
    assert sweep("resume=s").code == 0
    assert [row["exit_code"] for row in results_in("s")] == [0, 0]
    assert len(list((tmp_path / "jobs").iterdir())) == 3


@pytest.mark.slow
def test_a_killed_search_with_jobs_equals_one_with_processes(
    overrides: list[str], tmp_path: Path
) -> None:
    space = ["adapter.r=choice(2,4,16)", "optimizer.lr=interval(1e-5,1e-1)"]
    space += ["sweep.search=optuna", "sweep.trials=10", "sweep.prune=median"]
    result = sweep(*overrides[:2], *space, "output.dir=local")
    assert result.code == 0, result.stderr
    command = [sys.executable, "-c", RUN_SWEEP, SLOW_TRIAL, *overrides, *space, "output.dir=killed"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(b"[6/10]"):
                # Wait until submitit has written its file: a job without that file exits.
                wait_for(lambda: len([*tmp_path.glob("killed/slurm/*/*_submitted.pkl")]) > 6)
                process.send_signal(signal.SIGKILL)
                break
    result = sweep("resume=killed")
    assert result.code == 0, result.stderr
    assert len(list((tmp_path / "jobs").iterdir())) == 10
    assert [row["overrides"] for row in results_in("killed")] == [
        r["overrides"] for r in results_in("local")
    ]
    stopped = [[row["stopped_at"] for row in results_in(name)] for name in ("killed", "local")]
    assert stopped[0] == stopped[1] and any(stopped[0])


@pytest.mark.slow
def test_a_job_resumes_after_its_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses submitit's local executor and SIGUSR2, which SLURM sends before the time limit."""
    import psutil

    from app.config import LauncherConfig

    monkeypatch.setattr(slurm.SlurmLauncher, "cluster", "local")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    launcher = slurm.SlurmLauncher(LauncherConfig(gpus=0), "auto", tmp_path / "sweep", 1)
    folder = tmp_path / "sweep" / "0"
    folder.mkdir(parents=True)
    command = [sys.executable, "-S", "-c", RESUMABLE_TRIAL]
    job = launcher.start(0, command, folder, tmp_path / "sweep" / "0.log")
    wait_for((folder / "started").exists)
    psutil.Process(int(job.id)).children()[0].send_signal(signal.SIGUSR2)
    wait_for(lambda: job.poll() is not None)
    assert job.poll() == 0, job.problem
    assert (folder / "saved").exists() and job.seconds < 60


def test_a_trial_that_a_signal_ends_can_be_read(tmp_path: Path) -> None:
    """The kernel kills a trial that is out of memory, and -9 would not be an exit code."""
    folder, log, end = tmp_path / "0", tmp_path / "0.log", tmp_path / "end.json"
    command = [sys.executable, "-S", "-c", "import os; os.kill(os.getpid(), 9)"]
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert slurm.TrialJob(command, folder, log, end)() == 137
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert slurm._read_end(end)[0] == 137
    job = trials.LocalJob(command, folder, log, None)
    wait_for(lambda: job.poll() is not None)
    assert job.poll() == 137


@pytest.mark.slow
def test_a_dead_job_is_a_failed_trial(overrides: list[str], tmp_path: Path) -> None:
    (tmp_path / "bin" / "srun").write_text("#!/bin/bash\nexit 1\n")
    result = sweep(*overrides, "adapter.r=2,4", "sweep.parallel=2", "output.dir=s")
    assert result.code == 3
    assert [row["error"][:26] for row in results_in("s")] == [
        f"job {number} ended as FAILED: {tmp_path}"[:26] for number in (1, 2)
    ]


def test_invalid_job_settings_are_refused(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for typed, message in (
        (["trainer.num_nodes=2"], "launcher=slurm runs each trial on one node; type trainer.num_n"),
        (
            ["launcher=local", "launcher.gpus=2"],
            "launcher.gpus=2 has no effect with",
        ),
        (["launcher.minutes=5"], "launcher.minutes=5: expected 10 or more"),
        (
            [f"data.datasets=[{{path: '{URL}'}}]"],
            "launcher=local, or data that needs no secret",
        ),
    ):
        result = sweep(*overrides, "adapter.r=2,4", *typed)
        assert result.code == 2 and message in result.stderr, result.stderr
    result = run_command("+experiment=quickstart", "launcher=slurm")
    assert result.code == 2 and "add -m" in result.stderr
    (tmp_path / "bin" / "sbatch").unlink()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    result = sweep(*overrides, "adapter.r=2,4")
    assert result.code == 3 and "sbatch was not found" in result.stderr
    monkeypatch.setattr(slurm, "find_spec", lambda _: None)
    assert "pip install -e '.[slurm]'" in sweep(*overrides, "adapter.r=2,4").stderr
    assert not (tmp_path / "outputs").exists()
