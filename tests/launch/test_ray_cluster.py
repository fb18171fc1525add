"""`app.launch launcher=ray` on a real Ray with two nodes, which are simulated hosts."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.hosts import Host, hosts_error, two_hosts
from tests.processes import LONGEST, RUN, TWO_RANKS, type_train
from tests.runs import check_same_run
from tests.tiny import TINY_BASE, small_run

pytestmark = pytest.mark.slow

TWO_NODES = ("trainer.accelerator=cpu", "trainer.num_nodes=2", "trainer.devices=1")
BASE = f"model.path={TINY_BASE}"
"""comes with the program, and so is there on every node"""
OPTIONS = ("--num-cpus=2", "--object-store-memory=100000000", "--disable-usage-stats")


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

    def launch(self, run: Path, *words: str, code: int = 0) -> str:
        """Launch a run on both nodes; return its log."""
        command = (sys.executable, "-m", "app.launch", "launcher=ray", "launch.watch=true")
        settings = small_run(*RUN, *TWO_NODES, BASE, *words)
        return self.type(self.pair[0], *command, f"output.dir={run}", *settings, code=code)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Ray on two hosts; skips the test where Ray or simulated hosts are missing."""
    if shutil.which("ray") is None:
        pytest.skip("ray not found (pip install 'ray[default,train]')")
    if (reason := hosts_error()) is not None:
        pytest.skip(reason)
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


def test_a_failed_run_ends_the_watch_with_its_exit_code(cluster: Cluster, tmp_path: Path) -> None:
    log = cluster.launch(tmp_path / "run", "faults=[nan@2]", code=4)
    assert "Started training worker group" in log and "RESUME: from" not in log
    assert log.rstrip().endswith("failed")
