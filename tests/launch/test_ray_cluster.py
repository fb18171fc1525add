"""`app.launch launcher=ray` on a real Ray with two nodes, which are simulated hosts."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from app.process.faults import NOTES_FILE
from tests.hosts import Host, two_hosts
from tests.processes import LONGEST, RUN, TWO_RANKS, type_train
from tests.runs import check_same_run, losses_of
from tests.tiny import TINY_BASE, small_run

pytestmark = pytest.mark.slow

TWO_NODES = ("trainer.accelerator=cpu", "trainer.num_nodes=2", "trainer.devices=1")
BASE = f"model.path={TINY_BASE}"
"""comes with the program, and so is there on every node"""
OPTIONS = ("--num-cpus=1", "--object-store-memory=100000000", "--disable-usage-stats")


@dataclass(frozen=True)
class Cluster:
    """Ray's head on the first of two hosts, and a worker on the second."""

    pair: tuple[Host, Host]

    @property
    def environment(self) -> dict[str, str]:
        python = str(Path(sys.executable).parent)  # of the jobs too
        return {
            "PATH": f"{python}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "RAY_API_SERVER_ADDRESS": f"http://{self.pair[0].address}:8265",
        }

    def type(self, host: Host, *words: str, code: int = 0) -> str:
        """Type a command on a host; return what it prints."""
        started = host.start(*words, environment=self.environment)
        output, _ = started.communicate(timeout=LONGEST)
        assert started.returncode == code, output
        return output

    def command(self, run: Path, *words: str) -> list[str]:
        """Return the command that launches a run on both nodes, and prints its log."""
        launch = (sys.executable, "-m", "app.launch", "launcher=ray", "launch.watch=true")
        return [*launch, f"output.dir={run}", *small_run(*RUN, *TWO_NODES, BASE, *words)]

    def launch(self, run: Path, *words: str, code: int = 0) -> str:
        """Launch a run on both nodes; return its log."""
        return self.type(self.pair[0], *self.command(run, *words), code=code)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Ray on two hosts; skips the test where Ray or simulated hosts are missing."""
    if shutil.which("ray") is None:
        pytest.skip("ray not found (pip install 'ray[default,train]')")
    with two_hosts() as pair:
        first, second = pair
        started = Cluster(pair)
        head = ("--head", f"--dashboard-host={first.address}", "--port=6379")
        started.type(first, "ray", "start", *head, f"--node-ip-address={first.address}", *OPTIONS)
        joins = (f"--address={first.address}:6379", f"--node-ip-address={second.address}")
        started.type(second, "ray", "start", *joins, *OPTIONS)
        yield started


def test_a_run_whose_worker_is_killed_goes_on_and_ends_bit_equal(
    cluster: Cluster, tmp_path: Path
) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    log = cluster.launch(run, "faults=[rank_killed:1@5]")
    assert "RESUME: from" in log and "\x1b" not in log
    assert "'step': 6" in log and "'val/loss'" in log  # of a report to Ray
    assert log.rstrip().endswith("finished")
    code, output, errors = type_train(whole, *TWO_RANKS, BASE)
    assert code == 0, output + errors
    check_same_run(run, whole)


def test_a_run_goes_on_with_the_node_that_is_left(cluster: Cluster, tmp_path: Path) -> None:
    run, whole, lost = tmp_path / "run", tmp_path / "whole", cluster.pair[1]
    words = ("trainer.gradient_accumulation_steps=auto", "trainer.global_batch_size=4")
    words += ("adapter.dropout=0", "trainer.validate_every_steps=null", "data.sequence_len=128")
    command = cluster.command(run, *words, "launch.min_nodes=1", "faults=[hang:1@5]")
    started = cluster.pair[0].start(*command, environment=cluster.environment)
    until = time.monotonic() + LONGEST
    while not (run / NOTES_FILE).exists():
        assert started.poll() is None and time.monotonic() < until
        time.sleep(0.1)
    lost.send(signal.SIGKILL)
    log, _ = started.communicate(timeout=LONGEST)
    assert started.returncode == 0 and "RESUME: from" in log, log
    assert "device: 2 x cpu" in log and "device: 1 x cpu" in log, log
    code, output, errors = type_train(whole, *TWO_RANKS, BASE, *words)
    assert code == 0, output + errors
    assert losses_of(run) == pytest.approx(losses_of(whole), rel=1e-5)
