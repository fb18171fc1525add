"""Stopped, stalled and killed runs: checkpoints, messages and remaining processes.

In a stalled run one function of an ordinary command stalls: in a system call that a signal
interrupts, or in library code that no signal interrupts. Under torchrun: test_two_hosts.py.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path

import pytest

from app.training.checkpoint.store import CheckpointStore
from tests.processes import (
    GONE_WITHIN,
    LONGEST,
    RUN,
    TWO_RANKS,
    ends_within,
    processes_of,
    start_train,
    wait_until_gone,
)
from tests.reliability.shell import Shell
from tests.runs import check_same_run, rows_of
from tests.tiny import SAMPLES, TINY_BASE, small_run, train_into

pytestmark = pytest.mark.slow


def steps_of(run: Path) -> list[int]:
    return [checkpoint.step for checkpoint in CheckpointStore(run / "checkpoints").checkpoints()]


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


def test_two_ranks_stop_together_and_are_restarted(shell: Shell, tmp_path: Path) -> None:
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
    shell.train_into(tmp_path / "whole", *small_run(*RUN, *TWO_RANKS))
    check_same_run(run, tmp_path / "whole")


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


TOKENS = "data_modules.tokens.encode:ChunkEncoder.__call__"
ANSWERS = "app.evaluation.evaluator:answer_batches"
Stall = Callable[..., str]


@pytest.fixture
def stall(shell: Shell, tmp_path: Path) -> Stall:
    def stall_and_stop(verb: str, place: str, how: str, calls: int, *words: str) -> str:
        """Send SIGTERM to a stalled command, which must end soon; return its output.

        No temporary files may be left.
        """
        folder, sent = tmp_path / "run", list[float]()
        folder.mkdir()

        def stop(pid: int) -> None:
            until = time.monotonic() + LONGEST
            while not (folder / "stalls").exists():
                assert Path(f"/proc/{pid}").exists() and time.monotonic() < until
                time.sleep(0.05)
            time.sleep(0.3)
            sent.append(time.monotonic())
            os.kill(pid, signal.SIGTERM)

        typed = [verb, place, how, str(folder), str(calls), *words]
        typed += [f"data.cache_dir={folder / 'cache'}", f"output.dir={folder / 'out'}"]
        module = "tests.end_to_end.stalling"
        status = shell.type_train(typed, folder, module=module, meanwhile=stop)
        assert status.code == 143 and time.monotonic() - sent[0] < ends_within(), status.output
        names = [file.name for file in folder.rglob("*")]
        assert not [name for name in names if re.search(r"\.tmp|^\.\w+\.\w+\.\d+$", name)]
        return status.output

    return stall_and_stop


@pytest.mark.parametrize(
    ("place", "word"),
    [(TOKENS, "data.num_proc=2"), (ANSWERS, "evaluation.exact_match=true")],
    ids=["tokens in workers", "answers at the end"],
)
def test_a_stalled_run_ends_within_the_limit(place: str, word: str, stall: Stall) -> None:
    stall("train", place, "hangs", 0, *small_run("trainer.max_steps=1", word))


def test_completed_steps_are_saved_if_data_stalls(tmp_path: Path, stall: Stall) -> None:
    """process/test_signals.py has data that hangs in a library: then nothing can be saved."""
    words = small_run("trainer.max_steps=9", "data.val_set_size=0", "logger=csv")
    words += ["trainer.checkpoint.every_steps=9", "evaluation.exact_match=false"]
    batches = "data_modules.datamodule:_Batches.__getitem__"
    output = stall("train", batches, "sleeps", 4, *words)  # two per step
    saved = CheckpointStore(tmp_path / "run" / "out" / "checkpoints").newest_good()[0]
    assert saved is not None and saved.step == 2
    assert "the data of the next step did not arrive; step 2 is saved" in output


def test_an_interrupted_evaluation_is_repeated_on_resume(tmp_path: Path, stall: Stall) -> None:
    measured = (
        *small_run("trainer.validate_every_steps=2", "trainer.checkpoint.every_steps=9"),
        "logger=csv",
        "evaluation.tasks=[{name: boolq, few_shot: 0}]",
        *("evaluation.exact_match=false", "evaluation.every_steps=2"),
    )
    # After step 2.
    output = stall("train", "app.evaluation.likelihood:score", "sleeps", 1, *measured)
    assert "the interrupted measurement will be repeated; step 2 is saved" in output
    resumed = train_into(tmp_path / "run" / "out", *measured, "resume=must")
    check_same_run(resumed, train_into(tmp_path / "whole", *measured))


def test_another_stalled_verb_ends_within_the_limit(stall: Stall) -> None:
    data = f"data.test_datasets=[{{path: {SAMPLES / 'orders_test.jsonl'}}}]"
    output = stall("evaluate", TOKENS, "sleeps", 0, data, f"model.path={TINY_BASE}")
    assert "stopped by SIGTERM" in output and "Traceback" not in output
