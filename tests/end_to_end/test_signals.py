"""Stopped and killed runs: checkpoints, messages and remaining processes.

Under torchrun: test_two_hosts.py.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
from dataclasses import astuple
from pathlib import Path

import pytest

from app.training.checkpoint.store import CheckpointStore
from tests.processes import (
    GONE_WITHIN,
    LONGEST,
    RUN,
    TWO_RANKS,
    processes_of,
    start_train,
    wait_until_gone,
)
from tests.reliability.shell import Shell
from tests.runs import check_same_run, rows_of
from tests.tiny import small_run

pytestmark = pytest.mark.slow


def steps_of(run: Path) -> list[int]:
    return [checkpoint.step for checkpoint in CheckpointStore(run / "checkpoints").checkpoints()]


@pytest.fixture(scope="module")
def uninterrupted(shell: Shell, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("two") / "whole"
    shell.train_into(run, *small_run(*RUN, *TWO_RANKS))
    return run


def test_a_stopped_run_resumes_by_the_command_it_prints(shell: Shell, tmp_path: Path) -> None:
    shell.train_into(tmp_path / "whole", *small_run(*RUN))
    run = tmp_path / "run"
    words = ("resume=auto", "faults=[sigint@3,sigterm@7]", "data.num_workers=1")
    typed = [*small_run(*RUN, *words), f"output.dir={run}"]
    code, output, seconds_until_gone = astuple(shell.type_train(typed, tmp_path))
    assert (code, steps_of(run)) == (130, [2, 3]) and seconds_until_gone < GONE_WITHIN
    assert "stopped by SIGINT: step 3 is saved\n" in output and "Traceback" not in output
    assert "stopped after step 3 of" in (run / "report.html").read_text()
    output = shell.train_into(run, *small_run(*RUN, *words), code=143)
    assert steps_of(run) == [6, 7]
    command = output.partition("to resume: ")[2].splitlines()[0]
    typed = shlex.split(command)
    python = shutil.which(typed[0])
    assert python is not None and Path(python).samefile(shell.python)
    assert typed[1:3] == ["-m", "app.train"]
    assert shell.type_train(typed[3:], tmp_path).code == 0
    check_same_run(run, tmp_path / "whole")


def test_a_signal_to_the_process_group_saves_once(tmp_path: Path) -> None:
    words = small_run(*RUN, "data.num_workers=2", "trainer.max_steps=400")
    process = start_train(*words, f"output.dir={tmp_path / 'run'}")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step "):
            break
    workers = len(processes_of(tmp_path / "run")) - 1
    assert workers >= 2
    os.killpg(process.pid, signal.SIGTERM)
    output = process.communicate(timeout=LONGEST)[1]
    assert process.returncode == 143
    *_, last = steps_of(tmp_path / "run")
    assert f"stopped by SIGTERM: step {last} is saved" in output
    assert max(int(row["step"]) for row in rows_of(tmp_path / "run")) == last
    wait_until_gone(tmp_path / "run")


def test_two_ranks_stop_together_and_are_restarted(
    uninterrupted: Path, shell: Shell, tmp_path: Path
) -> None:
    run, bin_ = tmp_path / "run", tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/scontrol\n')
    (bin_ / "scontrol").chmod(0o755)
    slurm = {"SLURM_JOB_ID": "77", "PATH": f"{bin_}:{os.environ['PATH']}"}
    words = (
        *TWO_RANKS,
        "resume=auto",
        "supervise.requeue=true",
        "supervise.max_restarts=2",
        # Only one rank receives the signal of the time limit.
        "faults=[sigusr1:1@3,rank_killed:0@5,rank_killed:1@7]",
    )
    output = shell.train_into(run, *small_run(*RUN, *words), environment=slurm, code=138)
    assert steps_of(run) == [2, 3]
    assert "supervise.requeue: job 77 requeued" in output
    assert (tmp_path / "scontrol").read_text() == "requeue 77\n"
    output = shell.train_into(run, *small_run(*RUN, *words), environment=slurm)
    assert "rank 0 was killed by SIGKILL" in output and "after step 5" in output
    assert "rank 1 was killed by SIGKILL" in output and "after step 7" in output
    assert output.count("error") == 2 and "gloo" not in output
    assert "restart 1 of 2, from step 4" in output and "restart 2 of 2, from step 6" in output
    check_same_run(run, uninterrupted)


def test_three_resumed_ranks_reduce_gradients_in_the_same_order(
    shell: Shell, tmp_path: Path
) -> None:
    # The sum of two gradients is the same in either order; LoRA of rank 64 fills several buckets.
    words = ["trainer.devices=3", "trainer.accelerator=cpu", "adapter.r=64", "optimizer.lr=1e-2"]
    words.append("trainer.max_steps=4")
    killed = small_run(*RUN, *words, "resume=auto", "faults=[rank_killed:0@3]")
    shell.train_into(tmp_path / "run", *killed, code=3)
    shell.train_into(tmp_path / "run", *killed)
    shell.train_into(tmp_path / "whole", *small_run(*RUN, *words))
    check_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_killed_loader_worker_is_named(shell: Shell, tmp_path: Path) -> None:
    words = ("data.num_workers=1", "faults=[worker_killed@3]")
    output = shell.train_into(tmp_path / "run", *small_run(*RUN, *words), code=3)
    assert output.count("error") == 1 and "Traceback" not in output
    # PyTorch detects a signal or a missing worker, whichever comes first.
    assert re.search(r"DataLoader worker .*(killed by signal: Killed|exited unexpectedly)", output)
    assert "type a smaller data.num_workers" in output
