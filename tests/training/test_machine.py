"""What a run takes of its machine: measured, written, and warned of where it says something."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.config import load_config, settings_of
from app.model.architecture import load_architecture, text_numbers
from app.planning.memory import PlannedRun
from app.planning.model_size import build_planned_model
from app.planning.speed import estimate_speed
from app.planning.training import estimate_training
from app.strategy.settings import StrategyConfig
from app.training import machine
from app.training.machine import GIB, MachineWatch, WaitClock, host_memory, process_memory
from tests.tiny import TINY_BASE


class Gpu:
    def __init__(self, utilization: float) -> None:
        self.utilization = utilization

    def figures(self) -> dict[str, float]:
        return {"machine/gpu_utilization": self.utilization, "machine/gpu_memory_gib": 1.0}


def watch(folder: Path, waits: list[float], gpu: Any = None) -> MachineWatch:
    """A watch of a loop that waits so many seconds in each block of ten."""
    total = iter([sum(waits[:end]) for end in range(len(waits) + 1)])
    made = MachineWatch(folder, lambda: next(total), gpu=gpu)
    made.begin()
    return made


@pytest.mark.parametrize(
    ("waits", "utilization", "says"),
    [
        ([0.1] * 6, None, False),
        ([9.0, 0.1, 0.1, 0.1, 0.1, 0.1], None, False),  # the first block warms up
        ([0.1, 9.0, 0.1], None, False),  # not measured for long enough
        ([0.1, 3.0, 3.0, 3.0, 3.0, 3.0], None, True),
        ([0.1, 3.0, 3.0, 3.0, 3.0, 3.0], 0.5, True),
        ([0.1, 3.0, 3.0, 3.0, 3.0, 3.0], 0.97, False),  # it had enough to do meanwhile
    ],
)
def test_a_device_that_waits_for_data_is_said_once(
    tmp_path: Path, waits: list[float], utilization: float | None, says: bool,
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(machine, "host_memory", lambda: (8.0 * GIB, 24.0 * GIB))
    gpu = None if utilization is None else Gpu(utilization)
    watched = watch(tmp_path, waits, gpu)
    with caplog.at_level(logging.WARNING):
        shares = [watched.figures(10.0, 100.0)["speed/data_wait"] for _ in waits]
    assert shares == pytest.approx([waited / 10 for waited in waits])
    assert len(caplog.messages) == int(says)
    if says:
        assert "training waited for its data 30% of the last 30 s" in caplog.text
    assert watched.summary()["speed/data_wait"] == pytest.approx(
        sum(waits[1:]) / (10 * len(waits) - 10)
    )


@pytest.mark.parametrize(("left", "says"), [(0.5, True), (1.1, False)])
def test_memory_that_runs_out_is_said_once(
    tmp_path: Path, left: float, says: bool,
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(machine, "host_memory", lambda: (left * GIB, 24.0 * GIB))
    watched = watch(tmp_path, [0.0] * 3)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            watched.figures(10.0, 100.0)
    assert len(caplog.messages) == int(says)
    assert not says or "host memory: 0.50 of 24.0 GiB are left" in caplog.text


def test_what_the_host_says_of_itself() -> None:
    left, total = host_memory()
    assert 0 < left <= total and 0 < process_memory() < total


@pytest.mark.parametrize("files", machine.CONTAINERS, ids=["v2", "v1"])
def test_a_container_has_what_its_limit_leaves(
    files: tuple[str, str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    limit, used, counts, kept = (*(tmp_path / name for name in files[:3]), files[3])
    limit.parent.mkdir(exist_ok=True)
    limit.write_text(f"{GIB}\n")
    used.write_text(f"{GIB * 3 // 4}\n")
    counts.write_text(f"anon 1\n{kept} {GIB // 4}\n")
    assert host_memory() == (GIB / 2, GIB)
    limit.write_text("max\n")
    assert host_memory()[1] > GIB


def test_only_waiting_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 3.5, 10.0, 10.5])
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(times))
    clock = WaitClock()
    clock.stop()
    for _ in range(2):
        clock.start()
        clock.stop()
    assert clock.seconds == 3.0


def test_mfu_is_that_of_a_plan() -> None:
    config = load_config("train", [f"model.path={TINY_BASE}", "data=skills"])
    numbers = text_numbers(load_architecture(config.model).to_dict())
    plan = PlannedRun(
        model=build_planned_model(config.model, numbers, config.adapter, "bf16"),
        hardware=replace(settings_of("hardware", "h100"), gpus_per_node=1),
        strategy=StrategyConfig(name="single"),
        quantization=config.quantization,
        recompute="none",
        sequence_len=512,
    )
    found = estimate_training(plan).tokens_at_full_rate
    assert found is not None
    speed = estimate_speed(plan)
    assert speed.tokens_per_second / found == pytest.approx(speed.mfu)
    assert estimate_training(replace(plan, is_on_gpu=False)).tokens_at_full_rate is None
    unknown = replace(plan.hardware, name="NVIDIA Odd")
    assert estimate_training(replace(plan, hardware=unknown)).tokens_at_full_rate is None


@pytest.mark.gpu
def test_the_driver_tells_utilization_and_memory() -> None:
    watched = machine.watch_gpu(0)
    assert watched is not None
    found = watched.figures()
    assert 0 <= found["machine/gpu_utilization"] <= 1 and found["machine/gpu_memory_gib"] > 0
