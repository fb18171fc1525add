"""Bandwidth is computed as in nccl-tests; lost and hanging ranks end with an error message."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from app.config import load_config, settings_of
from app.doctor import bandwidth
from app.doctor.__main__ import Findings, print_findings
from app.doctor.bandwidth import (
    ALL_TO_ALL,
    COLLECTIVES,
    MIB,
    Measurement,
    best_bandwidth,
    estimate_communication,
    hardware_of_ranks,
    list_link_rows,
    list_step_rows,
    nominal_bandwidth,
)
from app.doctor.rows import OK, WARNING
from app.planning.communication import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from app.planning.hardware import HardwareConfig
from app.process.gpus import Machine
from app.process.launch import free_port, read_launch
from common.errors import UserError
from tests.conftest import ROOT
from tests.hosts import Host, hosts
from tests.processes import user_environment
from tests.reliability.shell import Shell

__all__ = ["hosts"]

H100 = settings_of("hardware", "h100")
ONE = "trainer.micro_batch_size=1"


FACTORS = {ALL_REDUCE: 2.0, ALL_GATHER: 1.0, REDUCE_SCATTER: 1.0, ALL_TO_ALL: 1.0}
"""collective -> times that its bytes pass a link, but for a rank's own share (doc/PERFORMANCE.md of
nccl-tests)"""


def measured_at(gb_per_second: float, num_ranks: int) -> list[Measurement]:
    """Measurements of 1 GiB whose bus bandwidth is known."""
    share = (num_ranks - 1) / num_ranks
    seconds = {kind: FACTORS[kind] * share * 2**30 / 1e9 / gb_per_second for kind in COLLECTIVES}
    return [
        Measurement(kind=kind, num_bytes=2**30, seconds=seconds[kind], num_ranks=num_ranks)
        for kind in COLLECTIVES
    ]


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    for num_ranks in (2, 8, 1000):
        for measurement in measured_at(12.5, num_ranks):
            assert measurement.gb_per_second == pytest.approx(12.5)


def full_tuning(*words: str) -> Any:
    typed = ("+experiment=llama8b", "adapter=full", "trainer.precision=bf16-pure")
    return load_config("plan", [*typed, "trainer.gradient_accumulation_steps=4", ONE, *words])


@pytest.mark.parametrize(
    ("strategy", "models"), [("ddp", 2.0), ("zero2", 1 + 4.0), ("zero3", 3 * 4.0)]
)
def test_needs_in_units_of_the_model(strategy: str, models: float) -> None:
    """2 x the weights per step for all-reduce, 3 x per micro-batch for full sharding."""
    hardware = hardware_of_ranks(H100, Machine(), 8, 2)
    cost = estimate_communication(
        full_tuning(f"strategy={strategy}"), hardware, measured_at(100.0, 16)
    )
    assert sum(each.models for each in cost.collectives) == pytest.approx(models, rel=1e-3)
    assert cost.seconds == pytest.approx(sum(each.gb for each in cost.collectives) / 100)


def test_links_are_compared_with_their_nominal_bandwidth() -> None:
    one, two = (hardware_of_ranks(H100, Machine(), 8, nodes) for nodes in (1, 2))
    assert (nominal_bandwidth(one), nominal_bandwidth(two)) == (450, 400)
    (good,) = list_link_rows(measured_at(370.0, 8), one)
    assert good.status == OK and "82 % of the link's nominal 450" in good.found
    (slow,) = list_link_rows(measured_at(45.0, 16), two)
    assert slow.status == WARNING and "NCCL_DEBUG=INFO" in slow.fix
    assert list_link_rows(measured_at(45.0, 2), HardwareConfig()) == []
    cost = estimate_communication(full_tuning("strategy=zero3"), two, measured_at(1.0, 16))
    (waits,) = list_step_rows(cost)
    assert waits.status == WARNING and "gradient_accumulation_steps" in waits.fix


def test_the_tables_of_ranks_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    two = hardware_of_ranks(H100, Machine(), 8, 2)
    cost = estimate_communication(full_tuning("strategy=zero3"), two, measured_at(1.0, 16))
    measured = tuple(measured_at(12.5, 8))
    print_findings(Findings(machines=(), rows=(), measured=measured, communication=cost))
    printed = capsys.readouterr().out
    for words in ("bus bandwidth of 8 ranks", "1 GiB", "communication of a step under zero3"):
        assert words in printed


ENDLESS = """
import os
import sys
from pathlib import Path
from app.doctor import bandwidth
from app.doctor.__main__ import run_doctor
from app.process.signals import end_process, install_signal_handlers

def time_and_tell(*args):
    Path(sys.argv[1], os.environ["RANK"]).touch()
    return measure_one(*args)

measure_one, bandwidth._time = bandwidth._time, time_and_tell
bandwidth._SIZES, bandwidth._WAIT_SECONDS = (2**20,) * 10**6, 4.0
install_signal_handlers()
end_process(run_doctor(["seconds=600"]))
"""
"""the verb with an endless series of small messages; each rank touches a file when it starts"""


@contextmanager
def ranks(
    *command: str, python: str = sys.executable
) -> Iterator[tuple[subprocess.Popen[str], subprocess.Popen[str]]]:
    """Start two ranks as torchrun does, but without its agent, which would end the other rank."""
    port = str(free_port())
    processes = []
    for rank in ("0", "1"):
        variables = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
        }
        processes.append(
            subprocess.Popen(
                [python, *command],
                cwd=ROOT,
                env=user_environment() | variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        yield processes[0], processes[1]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_two_cpu_ranks_are_measured_and_compared_with_a_step(shell: Shell) -> None:
    words = ("--json", "seconds=6", "+experiment=quickstart", "strategy=zero3")
    link = "hardware.link_gb_per_second=10000"
    with ranks("-m", "app.doctor", *words, link, python=shell.python) as (first, second):
        printed, errors = first.communicate(timeout=180)
        assert second.communicate(timeout=60)[0] == ""
    assert (first.returncode, second.returncode) == (0, 0), errors
    found = json.loads(printed)
    assert found["ok"] and errors.startswith("loft ")
    assert {one["kind"] for one in found["bandwidth"]} == set(COLLECTIVES)
    assert min(one["num_bytes"] for one in found["bandwidth"]) == MIB
    assert found["communication"]["strategy"] == "zero3" and found["communication"]["seconds"] > 0
    (judged,) = (row for row in found["rows"] if row["what"] == "link")
    assert judged["status"] == WARNING


@pytest.mark.slow
def test_a_rank_that_is_lost_ends_the_other_with_a_sentence(tmp_path: Path) -> None:
    with ranks("-c", ENDLESS, str(tmp_path)) as processes:
        until = time.monotonic() + 120
        while len(list(tmp_path.iterdir())) < len(processes):
            assert all(one.poll() is None for one in processes) and time.monotonic() < until
            time.sleep(0.1)
        processes[1].send_signal(signal.SIGSTOP)
        printed, error = processes[0].communicate(timeout=60)
    assert processes[0].returncode == 3, printed + error
    assert "has not ended after 4 s: a rank hangs, or a link is cut" in error
    assert "Traceback" not in error


def test_larger_messages_are_sent_while_time_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fake clock: 1 s per GiB for every collective."""
    import torch

    monkeypatch.setattr(bandwidth, "_largest_message", lambda world: 2**31)
    monkeypatch.setattr(
        bandwidth, "_time", lambda world, kind, size, expected: (size / 2**30, 4 * size / 2**30)
    )
    world = bandwidth.World(rank=0, num_ranks=2, num_local_ranks=2, device=torch.device("cpu"))
    largest = [MIB]
    for seconds in (1, 10, 60, 600):
        found = bandwidth.measure(world, seconds)
        assert sum(4 * one.seconds for one in found) <= seconds
        assert {one.kind for one in found if one.num_bytes == MIB} == set(COLLECTIVES)
        largest.append(max(one.num_bytes for one in found))
    assert largest == sorted(largest) and largest[1] < largest[-1] == 2**30
    assert best_bandwidth(found, ALL_TO_ALL) == pytest.approx(2**30 / 2 / 1e9)


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every rank of the machine, since ranks with a GPU would wait for those without."""
    ranks = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "RANK": "4", "LOCAL_RANK": "0"}
    for name, value in (ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    read_launch.cache_clear()
    try:
        with pytest.raises(UserError, match=r"4 ranks .* but 2 GPUs are visible; .* RANKS=2"):
            bandwidth.join_world()
    finally:
        read_launch.cache_clear()


SHAPED = 0.0125
"""GB/s of a link of 100 Mbit/s"""


@pytest.mark.slow
def test_a_link_of_known_speed_is_measured(hosts: tuple[Host, Host], shell: Shell) -> None:
    words = ("--json", "seconds=8", f"hardware.network_gb_per_second={SHAPED}")
    for host in hosts:
        host.shape("100mbit")
    first, second = (
        host.torchrun(
            *("-m", "app.doctor", *words),
            first=hosts[0].name,
            python=shell.python,
            stderr=subprocess.PIPE,
        )
        for host in hosts
    )
    printed, errors = first.communicate(timeout=240)
    assert first.returncode == 0, errors
    assert second.communicate(timeout=60)[0] == "" and second.returncode == 0
    found = json.loads(printed)
    best = max(one["gb_per_second"] for one in found["bandwidth"] if one["kind"] == ALL_REDUCE)
    assert 0.8 * SHAPED < best < 1.02 * SHAPED
    assert set(found["versions"]) == {"node1", "node2"}
    (link,) = (row for row in found["rows"] if row["what"] == "link")
    assert link["status"] == OK and "of the link's nominal 0.0125" in link["found"]
