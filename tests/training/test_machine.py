"""Machine statistics of a run, and the warnings about data wait and low memory."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.config import load_config, settings_of
from app.model.architecture import load_architecture, text_numbers
from app.planning.memory import PlannedRun
from app.planning.planned_model import build_planned_model
from app.planning.speed import estimate_speed
from app.planning.training import estimate_training
from app.strategy.settings import StrategyConfig
from app.training import callbacks, machine
from app.training.machine import GIB, MachineStats, host_memory, process_memory
from tests.tiny import TINY_BASE


class FakeGpu:
    def __init__(self, utilization: float) -> None:
        self.utilization = utilization

    def metrics(self) -> dict[str, float]:
        return {"machine/gpu_utilization": self.utilization, "machine/gpu_memory_gib": 1.0}


def start_stats(folder: Path, waits: list[float], gpu: Any = None) -> MachineStats:
    """Statistics of a loop that waits for data for `waits` seconds in each block."""
    total = iter([sum(waits[:end]) for end in range(len(waits) + 1)])
    stats = MachineStats(folder, lambda: next(total), gpu=gpu)
    stats.start()
    return stats


@pytest.mark.parametrize(
    ("waits", "utilization", "warns"),
    [
        ([0.1] * 6, None, False),
        ([9.0, 0.1, 0.1, 0.1, 0.1, 0.1], None, False),  # the first block warms up
        ([0.1, 9.0, 0.1], None, False),  # not measured for long enough
        ([0.1, 3.0, 3.0, 3.0, 3.0, 3.0], None, True),
        ([0.1, 3.0, 3.0, 3.0, 3.0, 3.0], 0.5, True),
        ([0.1, 3.0, 3.0, 3.0, 3.0, 3.0], 0.97, False),  # the GPU was busy all the same
    ],
)
def test_data_wait_is_warned_of_once(
    tmp_path: Path, waits: list[float], utilization: float | None, warns: bool,
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(machine, "host_memory", lambda: (8.0 * GIB, 24.0 * GIB))
    gpu = None if utilization is None else FakeGpu(utilization)
    stats = start_stats(tmp_path, waits, gpu)
    with caplog.at_level(logging.WARNING):
        shares = [stats.metrics(10.0, 100.0)["speed/data_wait"] for _ in waits]
    assert shares == pytest.approx([wait / 10 for wait in waits])
    assert len(caplog.messages) == int(warns)
    if warns:
        assert "training waited for data 30 % of the last 30 s" in caplog.text
    assert stats.summary()["speed/data_wait"] == pytest.approx(
        sum(waits[1:]) / (10 * len(waits) - 10)
    )


@pytest.mark.parametrize(("available", "warns"), [(0.5, True), (1.1, False)])
def test_low_memory_is_warned_of_once(
    tmp_path: Path, available: float, warns: bool,
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(machine, "host_memory", lambda: (available * GIB, 24.0 * GIB))
    stats = start_stats(tmp_path, [0.0] * 3)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            stats.metrics(10.0, 100.0)
    assert len(caplog.messages) == int(warns)
    assert not warns or "host memory: only 0.50 of 24.0 GiB are available" in caplog.text


def test_host_memory_is_plausible() -> None:
    available, total = host_memory()
    assert 0 < available <= total and 0 < process_memory() < total


@pytest.mark.parametrize("files", machine.CONTAINERS, ids=["v2", "v1"])
def test_available_memory_respects_a_container_limit(
    files: tuple[str, str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    limit, usage, statistics, cache_name = (*(tmp_path / name for name in files[:3]), files[3])
    limit.parent.mkdir(exist_ok=True)
    limit.write_text(f"{GIB}\n")
    usage.write_text(f"{GIB * 3 // 4}\n")
    statistics.write_text(f"anon 1\n{cache_name} {GIB // 4}\n")
    assert host_memory() == (GIB / 2, GIB)
    limit.write_text("max\n")
    assert host_memory()[1] > GIB


def test_fetches_of_training_batches_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 3.5, 10.0, 10.5])
    monkeypatch.setattr(callbacks.time, "perf_counter", lambda: next(times))
    profiler = callbacks.FetchProfiler()
    profiler.stop("[_TrainingEpochLoop].train_dataloader_next")
    for action in ("train_dataloader_next", "val_next", "training_step", "train_dataloader_next"):
        profiler.start(action)
        profiler.stop(action)
    assert profiler.seconds == 3.0


def test_mfu_is_the_one_that_a_plan_estimates() -> None:
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
    peak = estimate_training(plan).peak_tokens_per_second
    assert peak is not None
    speed = estimate_speed(plan)
    assert speed.tokens_per_second / peak == pytest.approx(speed.mfu)
    assert estimate_training(replace(plan, is_on_gpu=False)).peak_tokens_per_second is None
    unknown = replace(plan.hardware, name="NVIDIA Odd")
    assert estimate_training(replace(plan, hardware=unknown)).peak_tokens_per_second is None


@pytest.mark.gpu
def test_the_driver_reports_utilization_and_memory() -> None:
    gpu = machine.open_gpu_stats(0)
    assert gpu is not None
    metrics = gpu.metrics()
    assert 0 <= metrics["machine/gpu_utilization"] <= 1 and metrics["machine/gpu_memory_gib"] > 0
