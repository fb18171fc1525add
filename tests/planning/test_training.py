"""Runs that do not fit are refused before loading; estimates are compared with measurements."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.config import load_config
from app.planning import training
from app.planning.memory import GIB, estimate_gpu_memory
from app.planning.training import check_room, estimate_training, suggest_overrides
from app.training.machine import LOST
from common.errors import UserError
from tests.conftest import TrainRun
from tests.planning.test_choose import planned
from tests.planning.test_planned import STRATEGIES
from tests.tiny import small_run

TWO_CARDS = "model=llama70b quantization=nf4 hardware=2xrtx4090 strategy=fsdp recompute=full"


MEASURED = {"speed/data_wait": 0.1, "machine/gpu_utilization": 0.7, "speed/padding": 0.3}
PLANNED_CAUSES = ("kernels", "recompute", "micro_batch")


def test_a_run_that_will_not_fit_is_refused_with_overrides() -> None:
    run = planned(TWO_CARDS)
    config: Any = load_config("train", ["model=llama70b", "data=dolly", "quantization=nf4"])
    numbers = config.model.architecture

    def found() -> str:
        return suggest_overrides(config, run, numbers, lambda: STRATEGIES)

    with pytest.raises(UserError) as caught:
        check_room(run, estimate_training(run), "error", found)
    message = str(caught.value)
    assert message.startswith("this run will not fit: a step takes an estimated 28.9 of a GPU's")
    assert "; type " in message and message.endswith("or type plan.enforce=warn to try it")


def test_too_large_runs_are_refused_and_tight_ones_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = planned("model=llama8b hardware=h100 strategy=single")
    need = estimate_gpu_memory(run).total / GIB
    answers = {}
    for memory in (0.99 * need, 1.05 * need, 1.1 * need):
        here = replace(run, hardware=replace(run.hardware, memory_gib=memory))
        for enforce in ("error", "warn", "off"):
            caplog.clear()
            try:
                check_room(here, estimate_training(here), enforce, str)
            except UserError:
                answers[round(memory / need, 2), enforce] = "refused"
            else:
                answers[round(memory / need, 2), enforce] = "warned" if caplog.text else "ok"
    assert answers == {
        (0.99, "error"): "refused", (0.99, "warn"): "warned", (0.99, "off"): "ok",
        (1.05, "error"): "warned", (1.05, "warn"): "warned", (1.05, "off"): "ok",
        (1.1, "error"): "ok", (1.1, "warn"): "ok", (1.1, "off"): "ok",
    }  # fmt: skip


def test_too_little_host_memory_is_refused() -> None:
    run = planned("model=llama70b hardware=8xh100 strategy=fsdp hardware.host_memory_gib=64")
    with pytest.raises(UserError, match=r"of a machine's 64\.0 GiB host memory"):
        check_room(run, estimate_training(run), "error", str)


def test_planned_and_measured_figures_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = planned("model=llama8b hardware=h100 strategy=single recompute=none")
    estimate = estimate_training(run)
    copies = 2 * GIB
    measured = (estimate.peak_gib * GIB + copies) / 1.25
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: measured)
    module: Any = SimpleNamespace(
        model=torch.nn.Linear(1, 1),
        strategy=SimpleNamespace(root_device=torch.device("cuda")),
        metrics=SimpleNamespace(train_seconds=50.0, summary=lambda: MEASURED),
        trainer=SimpleNamespace(global_step=100),
        transposed_bytes=copies,
    )
    with caplog.at_level(logging.INFO):
        figures = estimate.compare(module)
    assert figures["memory/planned_peak_gib"] == pytest.approx(1.25 * figures["memory/peak_gib"])
    assert figures["speed/steps_per_second"] == 2.0
    assert estimate.speed is not None
    assert figures["speed/planned_steps_per_second"] == 1 / estimate.speed.step
    assert figures["speed/planned_lowest"] < figures["speed/planned_tokens_per_second"]
    causes = {name.removeprefix(LOST): value for name, value in figures.items() if LOST in name}
    expected = {"data_wait": 0.1, "launches": 0.2, "padding": 0.3}
    assert causes == pytest.approx(expected | dict.fromkeys(PLANNED_CAUSES, 0), abs=0.01)
    assert "planned (+25 %); 2 steps/s measured" in caplog.text


def test_what_slower_settings_cost_is_estimated_where_others_fit() -> None:
    fast = planned("model=llama8b hardware=h100 strategy=single recompute=none")
    fast = replace(fast, sequence_len=4096, micro_batch_size=1, accumulation=8)

    def lost(**how: Any) -> dict[str, float]:
        found = estimate_training(replace(fast, **how)).lost
        return {name.removeprefix(LOST): share for name, share in found.items()}

    assert all(share < 0.05 for share in lost().values())
    assert lost(recompute="full")["recompute"] > 0.2
    assert lost(fuses_norm_and_gate=False)["kernels"] > 0.2
    assert lost(sequence_len=128)["micro_batch"] > 0.2
    # A mode that does not fit is none to choose.
    longest = {"sequence_len": 98304, "recompute": "full"}
    assert lost(**longest)["recompute"] == 0
    on_cpu = estimate_training(replace(fast, is_on_gpu=False))
    assert on_cpu.lost == {} and on_cpu.speed is None


@pytest.mark.parametrize(("sequence_len", "is_bounded"), [(128, False), (8192, True)])
def test_on_a_cpu_the_process_and_what_malloc_keeps_are_counted(
    sequence_len: int, is_bounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = planned("model=llama8b hardware=h100 strategy=single recompute=none")
    run = replace(run, is_on_gpu=False, micro_batch_size=1, sequence_len=sequence_len)
    monkeypatch.setattr(training, "host_bytes", lambda name: {"VmRSS": 400_000_000}[name])
    memory, step = estimate_training(run).memory, estimate_gpu_memory(run)
    kept = memory.overhead - 400_000_000
    assert 0 < kept <= GIB
    assert (kept == GIB) == is_bounded
    assert is_bounded or 0.4 < kept / (step.activations + step.loss) < 0.5


def test_a_run_writes_both_figures_and_is_refused_before_loading(
    train_run: TrainRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = small_run("trainer.max_steps=2")
    folder = train_run(*words)
    metrics = json.loads((folder / "metrics.json").read_text())
    assert 0 < metrics["memory/planned_peak_gib"] < 2 * metrics["memory/peak_gib"]
    assert metrics["speed/steps_per_second"] > 0
    message = capsys.readouterr().out
    assert "memory: peak " in message and "GiB measured" in message
    assert "steps: 2 steps of " in message and "plan: " not in message

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("weights are loaded")

    monkeypatch.setattr(training, "host_memory_gib", lambda: 0.01)
    monkeypatch.setattr("app.assembly.base.load_base", never)
    monkeypatch.setattr("app.assembly.base.build_model", never)
    with pytest.raises(UserError, match="this run will not fit"):
        train_run(*words)
