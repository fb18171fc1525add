"""What the environment says of a rank, and what is said of it when it says half."""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.process.launch import RANK_VARIABLES, check_launch, is_child, is_first_rank, read_launch
from app.process.supervisor import SuperviseConfig
from app.run.ranks import REQUEUE_SECONDS, requeue
from tests.in_process import accepted, make_data, make_words, refused, run_command

ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
TORCHRUN = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", **ADDRESS}
LAUNCHED = {"LOFT_RUN_DIR": "x", "LOFT_PARENT": str(os.getppid())}
CHILD = {"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2", **LAUNCHED, **ADDRESS}
SRUN = {
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_NAME": "train",
}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for name in (*RANK_VARIABLES, *SRUN, "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    read_launch.cache_clear()
    yield monkeypatch
    read_launch.cache_clear()


@pytest.mark.parametrize(
    ("variables", "first", "child", "several"),
    [
        ({}, True, False, False),
        (TORCHRUN, False, False, True),
        (TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0"}, True, False, True),
        (CHILD, False, True, True),
        (CHILD | {"LOFT_PARENT": "1"}, False, False, True),
        (SRUN, False, False, True),
        (SRUN | {"SLURM_JOB_NAME": "bash"}, True, False, False),
        (SRUN | {"LOCAL_RANK": "0", "SLURM_PROCID": "0"}, True, False, True),
        (SRUN | TORCHRUN | {"TORCHELASTIC_RUN_ID": "x", "SLURM_PROCID": "0"}, False, False, True),
        ({"NODE_RANK": "1", **ADDRESS}, True, False, False),  # left over: it starts no rank
    ],
)
def test_each_launcher_is_understood(
    environment: pytest.MonkeyPatch,
    variables: dict[str, str],
    first: bool,
    child: bool,
    several: bool,
) -> None:
    for name, value in variables.items():
        environment.setenv(name, value)
    assert (is_first_rank(), is_child(), read_launch().is_one_of_several) == (first, child, several)
    assert check_launch(read_launch().num_ranks or 1) == []
    # Lightning takes it away when it has finished; what rank this is does not change by that.
    environment.delenv("WORLD_SIZE", raising=False)
    assert is_first_rank() == first


@pytest.mark.parametrize(
    ("variables", "fragments"),
    [
        ({"RANK": "1"}, ["RANK=1", "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT are not set"]),
        ({"LOCAL_RANK": "0"}, ["WORLD_SIZE, NODE_RANK", "unset LOCAL_RANK"]),
        ({"SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}, ["SLURM_PROCID is not set"]),
        (TORCHRUN | {"RANK": "one"}, ["RANK=one: expected a whole number"]),
    ],
)
def test_half_a_set_of_variables_is_a_problem_that_is_said(
    environment: pytest.MonkeyPatch, variables: dict[str, str], fragments: list[str]
) -> None:
    for name, value in variables.items():
        environment.setenv(name, value)
    (problem,) = check_launch(2)
    for fragment in fragments:
        assert fragment in problem
    assert is_first_rank()  # else nobody would say it


def test_ranks_that_were_started_are_those_of_the_settings(tmp_path: Path) -> None:
    words = make_words(tmp_path)
    first = TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0"}
    said = refused(*words, environment=first)
    assert "2 ranks were started" in said
    assert "; type trainer.devices=2\n" in said
    assert run_command(*words, "trainer.devices=2", environment=first).code == 0
    for nodes, started in ((4, first | {"WORLD_SIZE": "8"}), (2, SRUN | {"SLURM_PROCID": "0"})):
        said = refused(*words, environment=started)
        assert f"type trainer.devices=2 trainer.num_nodes={nodes}" in said
    auto = [*words, "trainer.devices=2", "trainer.num_nodes=auto"]
    assert run_command(*auto, environment=first | {"WORLD_SIZE": "8"}).code == 0
    said = refused(*auto, "trainer.devices=3", environment=first | {"WORLD_SIZE": "8"})
    assert "devices x trainer.num_nodes is 12; type trainer.devices=2 " in said
    alone = SRUN | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}
    assert run_command(*words, "trainer.num_nodes=auto", environment=alone).code == 0
    said = refused(*words, environment=first, verb="evaluate")
    assert "; type trainer.devices=2\n" in said
    assert "this command runs in one process" in refused(*words, environment=first, verb="preview")


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"WORLD_SIZE": "3"}, "2 of 3 ranks were started on this machine: all machines need"),
        ({"GLOO_SOCKET_IFNAME": "lo"}, "GLOO_SOCKET_IFNAME=lo is the loopback interface"),
        (
            {"MASTER_ADDR": "no-such-host."},
            "MASTER_ADDR=no-such-host.: this machine cannot resolve that host name",
        ),
    ],
)
def test_machines_that_could_not_meet_are_refused(
    variables: dict[str, str], said: str, tmp_path: Path
) -> None:
    words = make_words(tmp_path)
    words += ["trainer.devices=2", "trainer.num_nodes=2"]
    first = TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}
    assert run_command(*words, environment=first).code == 0
    assert run_command(*words, environment=first | {"NCCL_SOCKET_IFNAME": "^docker,l"}).code == 0
    stderr = refused(*words, environment=first | variables)
    assert said in stderr and stderr.count("error") == 1


def test_srun_needs_as_many_ranks_on_every_node(tmp_path: Path) -> None:
    words = make_words(tmp_path)
    words += ["trainer.devices=2", "trainer.num_nodes=2"]
    here = SRUN | {"SLURM_PROCID": "0"}
    assert run_command(*words, environment=here).code == 0
    del here["SLURM_NTASKS_PER_NODE"]
    said = refused(*words, environment=here)
    assert "SLURM_NTASKS_PER_NODE is not set" in said
    assert "type --ntasks-per-node=2 instead of --ntasks" in said


@pytest.mark.parametrize("rank", ["0", "2"])
def test_the_ranks_of_a_job_stay_until_the_first_has_requeued_it(
    environment: pytest.MonkeyPatch, tmp_path: Path, rank: str
) -> None:
    """srun --kill-on-bad-exit=1 ends the step with the first of its ranks."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/called\n')
    scontrol.chmod(0o755)
    environment.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for name, value in (SRUN | {"SLURM_PROCID": rank, "SLURM_JOB_ID": "77"}).items():
        environment.setenv(name, value)
    waited: list[float] = []
    environment.setattr("app.run.ranks.wait_for_termination", waited.append)
    requeue(SuperviseConfig(requeue=True))
    assert waited == ([] if rank == "0" else [REQUEUE_SECONDS])
    assert (tmp_path / "called").exists() == (rank == "0")
    requeue(SuperviseConfig())
    assert len(waited) == (rank != "0")


def test_several_machines_are_told_the_line_to_type(tmp_path: Path) -> None:
    words = [*make_words(tmp_path / "a folder"), "trainer.devices=4"]
    said = refused(*words, "trainer.num_nodes=2", environment={"NODE_RANK": "1", **ADDRESS})
    line = shlex.split(said.partition(": torchrun ")[2])
    assert line[:2] == ["--nnodes=2", "--nproc-per-node=4"]
    assert f"--rdzv-endpoint={socket.gethostname()}:29500" in line
    assert "--rdzv-conf=read_timeout=600" in line
    assert line[line.index("-m") + 1 :] == [
        "app.train",
        *words,
        "trainer.num_nodes=2",
        "output.dir=/shared/runs/train",
    ]
    started = TORCHRUN | {"WORLD_SIZE": "8", "RANK": "0", "LOCAL_RANK": "0"}
    assert run_command(*line[line.index("-m") + 2 :], environment=started).code == 0
    accepted(*words, "trainer.num_nodes=2", verb="preview")


def test_children_leave_the_checks_to_their_parent(tmp_path: Path) -> None:
    words = ["model.path=/nope", f"data.datasets=[{{path: {make_data(tmp_path / 'd.jsonl')}}}]"]
    assert run_command(*words, environment=CHILD).code == 0
    assert refused(*words, environment=TORCHRUN) == ""
