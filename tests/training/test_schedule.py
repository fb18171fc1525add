"""The learning rate: its shapes, its peak, and schedule-free AdamW, which averages instead."""

from __future__ import annotations

import contextlib
import io
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from app.model.adapter import (
    DEFAULT_LR,
    AdapterConfig,
    FreezeConfig,
    FullConfig,
    Ia3Config,
    LoraConfig,
)
from app.process.logs import LOG_FILE
from app.training.module import FinetuneModule
from app.training.optimizers import (
    FAR,
    USUAL_LR,
    AdamWConfig,
    LearningRate,
    ScheduleConfig,
    build_schedule,
    format_lr,
    lr_factor,
    resolve_lr,
)
from tests.conftest import TrainRun, read_column
from tests.tiny import small_run, train_into


def fall(progress: float, least: float = 0.0) -> float:
    """Return half a cosine from 1 to `least`."""
    return least + (1 - least) * 0.5 * (1 + math.cos(math.pi * progress))


WARM: dict[str, Any] = {"warmup_steps": 2, "min_lr_ratio": 0.1}
NONE: dict[str, Any] = {"warmup_steps": 0}
QUARTERS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.0)
CYCLE: dict[str, Any] = {"warmup_steps": 3, "start_lr_ratio": 0.2, "min_lr_ratio": 0.01}
CASES: dict[str, tuple[str, dict[str, Any], int, list[float]]] = {
    "warm-up": ("linear", {"warmup_steps": 4}, 20, [0.25, 0.5, 0.75, 1.0, 1.0]),
    "ratio, rounded up": ("cosine", {"warmup_ratio": 0.03}, 50, [0.5, 1.0]),
    "no steps before ratio": ("cosine", {"warmup_ratio": 0.5, **NONE}, 20, [1.0]),
    "constant": ("constant", {**NONE, "min_lr_ratio": 0.1}, 10, [1.0] * 11),
    "linear, warm": ("linear", WARM, 6, [0.5, 1.0, *(1 - 0.9 * at for at in QUARTERS)]),
    "cosine, warm": ("cosine", WARM, 6, [0.5, 1.0, *(fall(at, 0.1) for at in QUARTERS)]),
    "wsd": (
        "wsd",
        {"warmup_steps": 2, "decay_ratio": 0.2},
        20,
        [0.5, *[1.0] * 16, 1 - 0.5, 1 - 2**-0.5, 1 - 0.75**0.5, 0.0, 0.0],
    ),
    "wsd to a minimum": (
        "wsd",
        {**NONE, "decay_ratio": 0.5, "min_lr_ratio": 0.1},
        10,
        [*[1.0] * 6, *(0.1 + 0.9 * (1 - (part / 5) ** 0.5) for part in (1, 2, 3, 4, 5))],
    ),
    "wsd never decays within the warm-up": (
        "wsd",
        {"warmup_steps": 8, "decay_ratio": 0.5},
        10,
        [*((step + 1) / 8 for step in range(8)), 1.0, 1 - 0.5**0.5],
    ),
}


@pytest.mark.parametrize(("shape", "numbers", "total", "expected"), CASES.values(), ids=CASES)
def test_factors_are_those_by_hand(
    shape: str, numbers: dict[str, Any], total: int, expected: list[float]
) -> None:
    config = ScheduleConfig(shape=shape, **numbers)
    factors = [lr_factor(step, total, config) for step in range(len(expected))]
    assert factors == pytest.approx(expected)


@pytest.mark.parametrize(("total", "ratio"), [(20, 0.3), (40, 0.25), (10, 0.5)])
def test_one_cycle_is_that_of_torch(total: int, ratio: float) -> None:
    config = ScheduleConfig(shape="one_cycle", warmup_ratio=ratio, min_lr_ratio=4e-6)
    ours, theirs = (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(2))
    schedules = (
        build_schedule(ours, config, total),
        torch.optim.lr_scheduler.OneCycleLR(
            theirs, max_lr=0.1, total_steps=total, pct_start=ratio, cycle_momentum=False
        ),
    )
    rates: dict[int, list[float]] = {0: [], 1: []}
    for _ in range(total - 1):
        for place, (optimizer, schedule) in enumerate(zip((ours, theirs), schedules, strict=True)):
            rates[place].append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
    assert rates[0] == pytest.approx(rates[1], rel=1e-9)
    assert max(rates[0]) == rates[0][round(total * ratio) - 1] == 0.1
    assert ours.param_groups[0]["lr"] == pytest.approx(theirs.param_groups[0]["lr"], rel=1e-6)


METHODS = [LoraConfig(), Ia3Config(), FreezeConfig(), FullConfig()]


def resolve(
    adapter: AdapterConfig, batch: int = 8, *, from_scratch: bool = False, **optimizer: Any
) -> LearningRate:
    return resolve_lr(AdamWConfig(**optimizer), adapter, batch, from_scratch=from_scratch)


def test_the_sum_of_a_scaled_rate_is_written_out() -> None:
    assert resolve(LoraConfig(), lr=3e-3) == LearningRate(3e-3, "lr 3e-3", None)
    lr = resolve(LoraConfig(), 64, lr=2e-4, scale_lr="sqrt")
    assert lr.value == pytest.approx(2e-4 * math.sqrt(8))
    assert lr.sentence == "lr 2e-4 x sqrt(64 / 8) = 5.66e-4"
    lr = resolve(LoraConfig(), 4, scale_lr="linear", base_batch_size=16)
    assert lr.value == pytest.approx(5e-5)
    assert lr.sentence == "lr 2e-4 x (4 / 16) = 5e-5 (2e-4 is the default of adapter=lora)"


@pytest.mark.parametrize(
    ("value", "text"),
    [(2e-4, "2e-4"), (5.656e-4, "5.66e-4"), (3e-3, "3e-3"), (0.01, "0.01"), (1.0, "1"), (0, "0")],
)
def test_rates_are_written_as_people_write_them(value: float, text: str) -> None:
    assert format_lr(value) == text
    assert float(text) == pytest.approx(value, rel=1e-2)


@pytest.mark.parametrize("adapter", METHODS, ids=lambda adapter: adapter.name)
def test_a_rate_is_doubted_from_ten_times_outside_of_the_usual_range_on(
    adapter: AdapterConfig,
) -> None:
    lowest, highest = USUAL_LR[adapter.name]
    assert lowest <= DEFAULT_LR[adapter.name] <= highest
    for inside in (lowest / FAR * 1.01, lowest, highest, highest * FAR * 0.99):
        assert resolve(adapter, lr=inside).warning is None, inside
    default = format_lr(DEFAULT_LR[adapter.name])
    for lr, where in ((highest * FAR * 1.1, "11 times above"), (lowest / FAR / 1.1, "times below")):
        warning = resolve(adapter, lr=lr).warning
        assert warning is not None and where in warning
        assert f"type optimizer.lr={default}" in warning
    said = f"lr {default} ({default} is the default of adapter={adapter.name})"
    assert resolve(adapter) == LearningRate(DEFAULT_LR[adapter.name], said, None)


def test_a_rate_that_scaling_made_too_large_is_doubted_and_from_scratch_none_is() -> None:
    assert resolve(FullConfig(), lr=5e-5).warning is None
    scaled = resolve(FullConfig(), 512, lr=5e-5, scale_lr="linear")
    assert scaled.warning is not None and "3.2e-3" in scaled.warning
    assert "optimizer.scale_lr=none" in scaled.warning
    assert resolve(FullConfig(), lr=3e-3).warning is not None
    assert resolve(FullConfig(), lr=3e-3, from_scratch=True).warning is None


def test_a_run_scales_by_all_packs_of_a_step_and_says_what_it_does(tmp_path: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        train_into(
            tmp_path / "run",
            "optimizer.scale_lr=sqrt",
            "optimizer.lr=1e-2",
            "adapter.lora_plus_ratio=4",
            "optimizer.lr_by_pattern=[{pattern: *.layers.1.*, ratio: 0.5}]",
            "trainer.micro_batch_size=2",
            "schedule=constant",
            "schedule.warmup_steps=0",
            "trainer.max_steps=1",
            "data.val_set_size=0",
        )
    output = printed.getvalue()
    assert "lr 0.01 x sqrt(4 / 8) = 7.07e-3" in output
    assert "warning: learning rate 7.07e-3 is 14 times above" in output
    # The curves show the base rate; the table shows that of B, too.
    rates = read_column(tmp_path / "run", "train/lr")
    assert list(rates.values()) == pytest.approx([0.01 / math.sqrt(2)])
    details = (tmp_path / "run" / LOG_FILE).read_text().splitlines()
    rows = [line for line in details if re.search(r"q_proj +lora B", line)]
    assert "0.0283" in rows[0] and "0.0141" in rows[1]


WORDS = ["optimizer=schedule_free", "schedule=constant", "optimizer.lr=3e-3", "adapter.dropout=0"]
Seen = dict[str, Any]


def trained(module: FinetuneModule) -> dict[str, torch.Tensor]:
    named = module.model.named_parameters()
    return {name: p.detach().clone() for name, p in named if p.requires_grad}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Records the newest weights of each step, and the weights of each validation."""
    found: Seen = {"validation": [], "validated": [], "newest": []}
    validation_step, optimizer_step = FinetuneModule.validation_step, FinetuneModule.optimizer_step

    def optimizer_of(module: FinetuneModule) -> Any:
        return module.optimizers(use_pl_optimizer=False)

    def look_at_validation(module: FinetuneModule, *args: Any) -> Any:
        found["validation"].append(optimizer_of(module).param_groups[0]["train_mode"])
        found["validated"] = trained(module)
        return validation_step(module, *args)

    def look_at_step(module: FinetuneModule, *args: Any) -> None:
        optimizer_step(module, *args)
        state, named = optimizer_of(module).state, module.model.named_parameters()
        newest = {name: state[p]["z"].clone() for name, p in named if p.requires_grad}
        found["newest"].append(newest)

    monkeypatch.setattr(FinetuneModule, "validation_step", look_at_validation)
    monkeypatch.setattr(FinetuneModule, "optimizer_step", look_at_step)
    return found


def test_the_average_is_validated_and_saved_while_training_uses_its_own_weights(
    train_run: TrainRun, seen: Seen
) -> None:
    words = [*WORDS, "trainer.max_steps=6", "schedule.warmup_steps=0"]
    folder = train_run(*small_run("trainer.validate_every_steps=2"), *words)
    assert len(seen["validation"]) > 3 and not any(seen["validation"])
    saved = load_file(folder / "adapter" / "adapter_model.safetensors")
    in_memory = {name.replace(".default", ""): w for name, w in seen["validated"].items()}
    assert saved.keys() == in_memory.keys()
    for name, weight in saved.items():
        assert torch.equal(weight, in_memory[name]), name
    # At a constant rate it is the plain mean of the newest weights after each step.
    assert len(seen["newest"]) == 6
    for name, weight in seen["validated"].items():
        mean = torch.stack([newest[name] for newest in seen["newest"]]).mean(dim=0)
        assert torch.allclose(weight, mean, rtol=1e-4, atol=1e-6), name
        assert not torch.allclose(weight, seen["newest"][-1][name], rtol=1e-2, atol=1e-4), name


def test_the_average_is_saved_also_where_nothing_is_validated(
    train_run: TrainRun, seen: Seen
) -> None:
    words = small_run("data.val_set_size=0", "trainer.max_steps=2")
    folder = train_run(*words, *WORDS, "schedule.warmup_steps=0")
    assert not seen["validation"] and len(seen["newest"]) == 2
    saved = load_file(folder / "adapter" / "adapter_model.safetensors")
    for name, weight in saved.items():
        key = name.replace(".weight", ".default.weight")
        mean = torch.stack([newest[key] for newest in seen["newest"]]).mean(dim=0)
        assert torch.allclose(weight, mean, rtol=1e-4, atol=1e-6), name
