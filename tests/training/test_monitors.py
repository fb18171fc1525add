"""What a person sees of a run's progress, and machine statistics with their warnings."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.config import load_config, settings_of
from app.model.architecture import load_architecture, text_numbers
from app.planning.memory import PlannedRun
from app.planning.planned_model import build_planned_model
from app.planning.speed import estimate_speed
from app.planning.training import estimate_training
from app.process.logs import LOG_FILE, open_run_log, start_logging
from app.strategy.settings import StrategyConfig
from app.training import callbacks, machine
from app.training.callbacks import ProgressBar
from app.training.machine import GIB, MachineStats, host_memory
from app.training.metrics import Metrics
from tests.tiny import TINY_BASE


def started(
    total: int, every_steps: int, *, rank: int = 0
) -> tuple[Metrics, ProgressBar, Any, Any]:
    """Return the metrics and the progress bar of a run, its trainer and its module."""
    metrics, bar = Metrics(["a"], [], every_steps), ProgressBar()
    trainer = SimpleNamespace(is_global_zero=rank == 0, max_steps=total, global_step=0)
    return metrics, bar, trainer, SimpleNamespace(metrics=metrics)


def run_steps(total: int, every_steps: int, *, rank: int = 0) -> None:
    """Take the steps of a run as a trainer would: metrics write the first and every n-th."""
    metrics, bar, trainer, module = started(total, every_steps, rank=rank)
    bar.on_fit_start(trainer, module)
    bar.on_train_start(trainer, module)
    for step in range(1, total + 1):
        trainer.global_step = step
        if step == 1 or step % every_steps == 0:
            metrics.write(step, {"train/loss": 10.0 - step, "train/lr": 1e-3})
        bar.on_train_batch_end(trainer, module, None, None, step - 1)
    metrics.write(total, {"train/loss": 10.0 - total})
    metrics.write(total, {"val/loss": 0.25})
    bar.on_fit_end(trainer, module)


@pytest.mark.parametrize(
    ("total", "every", "steps"),
    [
        (1, 10, [1]),
        (5, 10, [1, 5]),
        (20, 10, [1, 10, 20]),
        (100, 10, [1, *range(20, 101, 10)]),
        (103, 1, [1, 12, 23, 34, 45, 56, 67, 78, 89, 100, 103]),
    ],
)
def test_the_last_step_is_always_printed(
    total: int, every: int, steps: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    run_steps(total, every)
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[1].split("/")[0]) for line in lines] == steps
    assert lines[-1].startswith(f"step {total}/{total}  loss {10 - total:.4f}  val 0.2500  ")
    assert lines[-1].endswith("done")
    assert all(line.endswith("s left") for line in lines[:-1])
    run_steps(total, every, rank=1)
    assert capsys.readouterr().out == ""


def test_a_resumed_run_counts_its_own_steps_for_the_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([100.0, 120.0])
    monkeypatch.setattr("app.training.callbacks.time.monotonic", lambda: next(clock))
    metrics, bar, trainer, module = started(1000, 10)
    bar.on_fit_start(trainer, module)
    trainer.global_step = 900
    bar.on_train_start(trainer, module)
    trainer.global_step = 910
    metrics.write(910, {"train/loss": 1.0})
    bar.on_train_batch_end(trainer, module, None, None, 9)
    assert capsys.readouterr().out.endswith("3.0 min left\n")


def test_the_log_of_a_run_has_what_was_said_before_it_had_a_folder(tmp_path: Path) -> None:
    start_logging()
    log = logging.getLogger("app.of_this_test")
    log.debug("a detail of %s", "hf_" + "a" * 34)
    open_run_log(tmp_path)
    log.info("said later")
    lines = (tmp_path / LOG_FILE).read_text().splitlines()
    assert "DEBUG a detail of <redacted>" in lines[0] and lines[1].endswith("INFO said later")
    (tmp_path / LOG_FILE).unlink()
    (tmp_path / LOG_FILE).symlink_to(tmp_path / "elsewhere")
    log.info("not through a link")
    assert not (tmp_path / "elsewhere").exists()


def start_stats(folder: Path, waits: list[float], gpu: Any = None) -> MachineStats:
    """Statistics of a loop that waits for data for `waits` seconds in each block."""
    total = iter([sum(waits[:end]) for end in range(len(waits) + 1)])
    stats = MachineStats(folder, lambda: next(total), gpu=gpu)
    stats.start()
    return stats


@pytest.mark.parametrize(
    ("waits", "utilization", "warns"),
    [
        ([9.0, 0.1, 0.1, 0.1, 0.1, 0.1], None, False),  # the first block warms up
        ([0.1, 9.0, 0.1], None, False),  # not measured for long enough
        ([0.1, 3.0, 3.0, 3.0, 3.0, 3.0], None, True),
        ([0.1, 3.0, 3.0, 3.0, 3.0, 3.0], 0.97, False),  # the GPU was busy all the same
    ],
)
def test_data_wait_is_warned_of_once(
    tmp_path: Path, waits: list[float], utilization: float | None, warns: bool,
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(machine, "host_memory", lambda: (8.0 * GIB, 24.0 * GIB))
    figures = {"machine/gpu_utilization": utilization}
    gpu = None if utilization is None else SimpleNamespace(metrics=lambda: figures)
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
