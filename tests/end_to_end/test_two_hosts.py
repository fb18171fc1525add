"""Two hosts under torchrun: one is killed, or their connection is cut."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from app.run.ranks import OWN_STORE_VARIABLE
from app.training.checkpoint.store import CheckpointStore
from tests.hosts import Host, hosts
from tests.processes import LONGEST, RUN, TWO_RANKS
from tests.reliability.shell import Shell
from tests.runs import check_same_run, losses_of
from tests.tiny import small_run

__all__ = ["hosts"]
pytestmark = pytest.mark.slow

NOTICED_WITHIN = 48.0
"""seconds within which a rank ends after losing another one, on a busy machine"""
LAST_CALL_SECONDS = 5
"""seconds that torchrun waits for more machines than the fewest it may run with"""
MANY_STEPS = 20
"""more steps than a fast machine takes before the connection is cut"""
TWO_HOSTS = (
    "trainer.num_nodes=2",
    "trainer.devices=1",
    "trainer.accelerator=cpu",
    "resume=auto",
    "supervise.hang_minutes=2",
)


@dataclass
class Training:
    """One run on two hosts; each torchrun prints into a file."""

    pair: tuple[Host, Host]
    run: Path
    words: list[str]
    python: str
    max_restarts: int = 0
    nodes: str = "2"
    """what torchrun's --nnodes gets"""
    environment: dict[str, str] = field(default_factory=dict)
    program: tuple[str, ...] = ("app.train",)
    torchruns: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    def start(self, *some: Host) -> None:
        """Start torchrun on both hosts, or on `some`."""
        for host in some or self.pair:
            with self._log(host).open("a") as log:
                self.torchruns[host.name] = host.torchrun(
                    *("-m", *self.program, *self.words, f"output.dir={self.run}"),
                    first=self.pair[0].name,
                    options=(
                        *(f"--max-restarts={self.max_restarts}", f"--nnodes={self.nodes}"),
                        f"--rdzv-conf=last_call_timeout={LAST_CALL_SECONDS}",
                    ),
                    environment=self.environment,
                    python=self.python,
                    stdout=log,
                )

    def _log(self, host: Host) -> Path:
        return self.run.parent / f"{host.name}.txt"

    def output(self, host: Host) -> str:
        return self._log(host).read_text(errors="replace")

    def all_output(self) -> str:
        return "".join(map(self.output, self.pair))

    def steps(self) -> list[int]:
        return [saved.step for saved in CheckpointStore(self.run / "checkpoints").checkpoints()]

    def wait_until(self, condition: Callable[[], object], seconds: float = LONGEST) -> None:
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < seconds, self.all_output()
            time.sleep(0.05)

    def has_ended(self) -> bool:
        return all(torchrun.poll() is not None for torchrun in self.torchruns.values())

    def wait_until_done(self) -> None:
        """Wait for the end of both torchruns, which must succeed."""
        self.wait_until(self.has_ended)
        codes = [torchrun.poll() for torchrun in self.torchruns.values()]
        assert codes == [0, 0], self.all_output()

    def ranks_of(self, host: Host) -> list[int]:
        """Return the running rank processes of a host."""
        found = []
        for pid in host.processes():
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if b"app.train" in words and b"torch.distributed.run" not in words and state != "Z":
                found.append(pid)
        return found


Start = Callable[..., Training]


@pytest.fixture
def start(hosts: tuple[Host, Host], shell: Shell, tmp_path: Path) -> Start:
    """Start a run and wait for its first checkpoint."""

    def start_training(*words: str, has_own_store: bool = True, **options: Any) -> Training:
        training = Training(
            pair=hosts,
            run=tmp_path / "run",
            words=small_run(*RUN, *TWO_HOSTS, *words),
            python=shell.python,
            environment={OWN_STORE_VARIABLE: "1"} if has_own_store else {},
            **options,
        )
        training.start()
        training.wait_until(lambda: training.has_ended() or training.steps())
        assert training.steps(), training.all_output()
        return training

    return start_training


def test_a_lost_connection_ends_both_hosts(hosts: tuple[Host, Host], start: Start) -> None:
    """Each reports once which other one it lost, why, and how to resume."""
    training = start("trainer.max_steps=400", "supervise.hang_minutes=0.1")
    hosts[1].cut()
    for rank, (host, other) in enumerate((hosts, hosts[::-1])):
        training.wait_until(lambda host=host: not training.ranks_of(host), NOTICED_WITHIN)
        output = training.output(host)
        (sentence,) = re.findall(r"^error .*", output, re.MULTILINE)
        assert f"rank {1 - rank} on host {other.name}" in sentence, output
        assert "the link to it is cut" in sentence, output
        assert "to resume: torchrun --nnodes=2 --nproc-per-node=1 " in output
        assert "--rdzv-endpoint=node1:29500 --rdzv-conf=read_timeout=600 -m app.train" in output
        stacks = (training.run / f"stacks-rank-{rank}.txt").read_text()
        assert "training_step" in stacks or "app/training" in stacks
    torchrun = training.torchruns["node1"]
    training.wait_until(lambda: torchrun.poll() is not None, NOTICED_WITHIN)
    output = training.output(hosts[0])
    assert "exitcode  : 3" in output and "traceback : error (the environment)" in output


def test_a_lost_connection_and_a_killed_rank_leave_the_run_unchanged(
    hosts: tuple[Host, Host], start: Start, shell: Shell, tmp_path: Path
) -> None:
    """A connection lost for longer than torchrun waits for a host, then a rank that is killed.

    torchrun restarts both hosts, also if it shares its store, with addresses of dead ranks.
    """
    steps = f"trainer.max_steps={MANY_STEPS}"
    words = (f"faults=[rank_killed:1@{MANY_STEPS - 2}]", steps)
    training = start(*words, max_restarts=1, has_own_store=False)
    hosts[1].cut()
    time.sleep(20)
    assert training.steps()[-1] < MANY_STEPS - 2, "the rank was killed before the link was cut"
    assert not training.has_ended()
    hosts[1].restore()
    training.wait_until_done()
    output = training.output(hosts[0])
    assert "lost rank 1 on host node2 after step " in output and "RESUME: from" in output
    assert f"under torchrun --max-restarts with {OWN_STORE_VARIABLE}=1" in output
    shell.train_into(tmp_path / "whole", *small_run(*RUN, *TWO_RANKS, steps))
    check_same_run(training.run, tmp_path / "whole")


def test_a_run_goes_on_with_the_hosts_that_are_there(
    hosts: tuple[Host, Host], start: Start, shell: Shell, tmp_path: Path
) -> None:
    """The second host is lost and comes back; nobody types anything on the first.

    In its third step alone, the first waits until torchrun restarts it for the second.
    """
    words = (
        *("trainer.max_steps=20", "trainer.gradient_accumulation_steps=auto"),
        *("trainer.global_batch_size=4", "adapter.dropout=0", "trainer.checkpoint.every_steps=1"),
        *("trainer.validate_every_steps=null", "data.sequence_len=128"),
    )
    alone = "app.strategy.ddp:SingleDevice.run_micro_batches"
    training = start(
        *(*words, "trainer.num_nodes=auto"),
        program=("tests.end_to_end.stalling", "train", alone, "waits", str(tmp_path), "2"),
        max_restarts=9,
        nodes="1:2",
    )

    def number_of_ranks() -> int:
        found = CheckpointStore(training.run / "checkpoints").checkpoints()
        return int(found[-1].details["num_ranks"])

    training.wait_until(lambda: number_of_ranks() == 2)  # a late second host is waited for alone
    hosts[1].send(signal.SIGKILL)
    (tmp_path / "stalls").unlink(missing_ok=True)
    training.wait_until((tmp_path / "stalls").exists)
    assert number_of_ranks() == 1
    training.start(hosts[1])
    training.wait_until(lambda: training.has_ended() or number_of_ranks() == 2)
    training.wait_until_done()
    output = training.output(hosts[0])
    assert number_of_ranks() == 2, "the run was done before the host was back"
    assert output.count("micro_batch_size 1 x accumulation 4 x 1 rank and was") == 1, output
    shell.train_into(tmp_path / "whole", *small_run(*RUN, *TWO_RANKS, *words))
    losses = losses_of(training.run)
    assert len(losses) == 20
    assert losses == pytest.approx(losses_of(tmp_path / "whole"), rel=1e-5)


def test_a_port_in_use_is_refused_with_a_fix(shell: Shell, tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
        output = shell.train_into(
            tmp_path / "run",
            *small_run(*RUN, *TWO_HOSTS),
            environment=rank | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            code=3,
        )
    assert output.count("error (the environment): ") == 1, output
    assert f"port {port} is in use on the machine of rank 0" in output
    assert "export MASTER_PORT=N before srun" in output
