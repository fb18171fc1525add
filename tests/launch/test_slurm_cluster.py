"""`app.launch launcher=slurm` on a real SLURM with two nodes, which are simulated hosts."""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from app.launch.__main__ import JOB_FILE
from app.process.faults import NOTES_FILE
from app.process.status import STATUS_FILE
from app.run.job import SIGNAL_SECONDS
from app.training.checkpoint.store import CheckpointStore
from tests.hosts import Host, two_hosts
from tests.launch.test_launch import EXPERIMENTS, start
from tests.processes import LONGEST, RUN
from tests.reliability.shell import Shell
from tests.runs import check_same_run, losses_of
from tests.tiny import small_run

pytestmark = pytest.mark.slow

CONFIG = """\
ClusterName=loft
SlurmctldHost={first.name}({first.address})
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=2,batch_sched_delay=0
SlurmdTimeout=10
ReturnToService=2
GresTypes=gpu
NodeName={first.name} NodeAddr={first.address} CPUs=8 Gres=gpu:8
NodeName={second.name} NodeAddr={second.address} CPUs=8 Gres=gpu:8
PartitionName=all Nodes=ALL Default=YES
"""
"""a requeued job starts again when its credentials expire, and the scheduler looks at its queue;
a node is down after SlurmdTimeout"""


SLOWEST, SLOW, FAST = "200kbit", "4mbit", "10gbit"
"""rates of the link: a step takes seconds, takes about half a second, and is not limited"""
TWO_NODES = ("trainer.accelerator=cpu", "trainer.num_nodes=2", "trainer.devices=1", "strategy=ddp")
LONG = ("trainer.max_steps=24", "trainer.checkpoint.every_steps=4")
SIGNAL_MINUTES = SIGNAL_SECONDS // 60
"""limit of a job at which it gets its signal when SLURM next looks at limits: every 30 s"""


@dataclass
class Cluster:
    """A controller on the first of two hosts, and a daemon that runs jobs on each."""

    pair: tuple[Host, Host]
    folder: Path
    python: str
    environment: dict[str, str] = field(init=False)
    controller: subprocess.Popen[str] = field(init=False)

    def __post_init__(self) -> None:
        self.environment = {"SLURM_CONF": f"{self.folder}/slurm.conf", "OMP_NUM_THREADS": "1"}

    def start(self) -> None:
        """Start the daemons, and wait until both nodes take jobs."""
        first, second = self.pair
        for name in ("state", first.name, second.name):
            (self.folder / name).mkdir(parents=True)
        user = pwd.getpwuid(os.getuid()).pw_name
        text = CONFIG.format(first=first, second=second, folder=self.folder, user=user)
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # need not be mounted
        for number in range(8):
            (self.folder / f"gpu{number}").touch()
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-7]\n")
        self.start_controller()
        for host in self.pair:
            self.start_daemon(host, "slurmd", "-N", host.name)
        self.wait_for_nodes()

    def start_controller(self) -> None:
        self.controller = self.start_daemon(self.pair[0], "slurmctld", "-i")

    def restart_controller(self) -> None:
        """Restart the controller, which then forgets the signals that it could not deliver."""
        self.controller.kill()
        self.controller.wait()
        self.start_controller()

    def start_daemon(self, host: Host, *words: str) -> subprocess.Popen[str]:
        with (self.folder / f"{words[0]}-{host.name}.log").open("ab") as log:
            return host.start(*words, "-D", environment=self.environment, stdout=log)

    def wait_for_nodes(self) -> None:
        wait_for(lambda: self.type("sinfo", "--noheader", "--format=%T").split() == ["idle"])

    def type(self, *words: str, code: int = 0) -> str:
        """Type a command on the first host; return what it prints."""
        started = self.pair[0].start(*words, environment=self.environment)
        output, _ = started.communicate(timeout=LONGEST)
        assert started.returncode == code, output
        return output

    def command(self, run: Path, *words: str) -> list[str]:
        """Return the command that launches a run on both nodes."""
        settings = small_run(*RUN, *TWO_NODES, *words)
        launch = (self.python, "-m", "app.launch", "launcher=slurm", "launcher.cpus=2")
        return [*launch, f"output.dir={run}", *settings]

    def launch(self, run: Path, *words: str) -> str:
        """Launch a run on both nodes; return the id of its job."""
        self.type(*self.command(run, *words))
        return str(json.loads((run / JOB_FILE).read_text())["id"])

    def job(self, number: str) -> dict[str, str]:
        """Return what SLURM says of a job, by its name."""
        shown = self.type("scontrol", "--oneliner", "show", "job", number)
        return dict(re.findall(r"(\w+)=(\S*)", shown))

    def limit(self, rate: str) -> None:
        """Limit the rate of the link, and so of the steps."""
        for host in self.pair:
            host.shape(rate)

    def wait_for_end(self, number: str, run: Path, whole: Path) -> None:
        """Wait until a job is done: its run was interrupted once, and equals one that was not."""
        wait_for(lambda: self.job(number)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"))
        job, log = self.job(number), (run / f"slurm-{number}.txt").read_text()
        assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), log
        assert "RESUME: from" in log
        check_same_run(run, whole)


def wait_for(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + LONGEST
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.5)


def wait_for_checkpoint(run: Path) -> None:
    wait_for(lambda: CheckpointStore(run / "checkpoints").newest_step() is not None)


def status_of(run: Path) -> dict[str, Any]:
    known: dict[str, Any] = json.loads((run / STATUS_FILE).read_text())
    return known


@pytest.fixture(scope="module")
def cluster(shell: Shell, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """SLURM on two hosts; skips the test where its daemons or simulated hosts are missing."""
    if missing := [name for name in ("slurmctld", "slurmd") if shutil.which(name) is None]:
        pytest.skip(f"{missing[0]} not found (packages slurmctld, slurmd and slurm-client)")
    with two_hosts() as pair:
        started = Cluster(pair, tmp_path_factory.mktemp("slurm"), shell.python)
        started.start()
        yield started


@pytest.fixture(scope="module")
def whole(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two nodes that nothing interrupts."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    said = cluster.type(*cluster.command(run, *LONG, "launch.watch=true"))
    assert "device: 2 x cpu" in said and said.rstrip().endswith("finished")
    return run


def test_slurm_takes_the_jobs_of_the_experiments(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("app.launch.__main__.check_files", lambda *_, **__: [])  # bases of the hub
    for experiment in EXPERIMENTS:
        words = ["launcher=slurm", "launch.submit=false", "launcher.cpus=1", "hardware=2x8xh100"]
        words += [f"+experiment={experiment}", f"output.dir={tmp_path / experiment}"]
        assert start(*words) == 0
        said = cluster.type("sbatch", "--test-only", str(tmp_path / experiment / "job.sbatch"))
        assert "using 16 processors on nodes node[1-2]" in said, said
    words = ["launcher=slurm", "launch.submit=false", "launcher.cpus=1", "hardware=2x9xh100"]
    assert start(*words, "+experiment=llama8b", f"output.dir={tmp_path / 'nine'}") == 0
    said = cluster.type("sbatch", "--test-only", str(tmp_path / "nine" / "job.sbatch"), code=1)
    assert "Requested node configuration is not available" in said


def test_a_job_that_reaches_its_time_limit_goes_on_and_ends_bit_equal(
    cluster: Cluster, whole: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    cluster.limit(SLOW)
    number = cluster.launch(run, *LONG)
    wait_for_checkpoint(run)
    cluster.limit(SLOWEST)  # its last step must not come before the signal
    cluster.type("scontrol", "update", f"JobId={number}", f"TimeLimit={SIGNAL_MINUTES}")
    wait_for(lambda: cluster.job(number)["Restarts"] == "1")
    known = status_of(run)
    assert (known["state"], known["exit_code"]) == ("stopped", 128 + signal.SIGUSR1)
    assert known["checkpoint"] == f"checkpoints/step-{known['step']}"
    cluster.type("scontrol", "update", f"JobId={number}", "TimeLimit=60")
    cluster.limit(FAST)
    cluster.wait_for_end(number, run, whole)


def test_a_job_that_loses_a_node_goes_on_when_it_is_back_and_ends_bit_equal(
    cluster: Cluster, whole: Path, tmp_path: Path
) -> None:
    run, node = tmp_path / "run", cluster.pair[1]
    cluster.limit(SLOW)
    number = cluster.launch(run, *LONG)
    wait_for_checkpoint(run)
    node.send(signal.SIGKILL)
    wait_for(lambda: cluster.job(number)["Restarts"] == "1")
    # srun has ended the step; of the same job and number, the new one would get that signal too.
    cluster.restart_controller()
    cluster.limit(FAST)
    cluster.start_daemon(node, "slurmd", "-N", node.name)
    cluster.wait_for_end(number, run, whole)
    cluster.wait_for_nodes()


def test_a_job_goes_on_with_the_node_that_is_left_and_with_both_when_it_is_back(
    cluster: Cluster, tmp_path: Path
) -> None:
    """A rank hangs where the test acts: first one of two, then the only one."""
    run, whole, node = tmp_path / "run", tmp_path / "whole", cluster.pair[1]
    words = (*LONG, "trainer.gradient_accumulation_steps=auto", "trainer.global_batch_size=4")
    words += ("adapter.dropout=0", "trainer.validate_every_steps=null", "data.sequence_len=128")
    cluster.limit(FAST)
    number = cluster.launch(run, *words, "launch.min_nodes=1", "faults=[hang:1@7,hang:0@15]")

    def wait_for_hang(step: int) -> None:
        fired = run / NOTES_FILE
        wait_for(lambda: fired.exists() and f"@{step}" in fired.read_text())

    wait_for_hang(7)
    node.send(signal.SIGKILL)
    wait_for(lambda: cluster.job(number)["Restarts"] == "1")
    cluster.restart_controller()
    wait_for_hang(15)
    assert cluster.job(number)["NumNodes"] == "1"
    cluster.start_daemon(node, "slurmd", "-N", node.name)
    wait_for(lambda: "idle" in cluster.type("sinfo", "--noheader", "--format=%T").split())
    cluster.type("scontrol", "requeue", number)
    wait_for(lambda: cluster.job(number)["Restarts"] == "2")
    wait_for(lambda: cluster.job(number)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"))
    job, log = cluster.job(number), (run / f"slurm-{number}.txt").read_text()
    assert (job["JobState"], job["NumNodes"]) == ("COMPLETED", "2"), log
    assert log.count("device: 2 x cpu") == 2 and log.count("RESUME: from") == 2, log
    cluster.wait_for_nodes()
    cluster.type(*cluster.command(whole, *words, "launch.watch=true"))
    losses = losses_of(run)
    assert len(losses) == 24 and losses == pytest.approx(losses_of(whole), rel=1e-5)


def test_a_cancelled_job_has_saved_and_the_same_command_resumes_it(
    cluster: Cluster, whole: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    cluster.limit(SLOW)
    command = cluster.command(run, *LONG, "launch.watch=true")
    watched = cluster.pair[0].start(*command, environment=cluster.environment)
    wait_for_checkpoint(run)
    number = json.loads((run / JOB_FILE).read_text())["id"]
    assert f"job {number} has not ended" in cluster.type(*command, code=3)
    cluster.type("scancel", number)
    said, _ = watched.communicate(timeout=LONGEST)
    assert watched.returncode == 128 + signal.SIGTERM, said
    known = status_of(run)
    assert known["state"] == "stopped"
    assert known["checkpoint"] == f"checkpoints/step-{known['step']}"
    cluster.limit(FAST)
    assert cluster.type(*command).rstrip().endswith("finished")
    check_same_run(run, whole)
