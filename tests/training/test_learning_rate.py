"""The peak learning rate: its default, how it grows with the batch, and when it is doubted."""

from __future__ import annotations

import contextlib
import io
import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from app.config.schema import docs_of
from app.model.adapter import (
    DEFAULT_LR,
    AdapterConfig,
    FreezeConfig,
    FullConfig,
    Ia3Config,
    LoraConfig,
)
from app.process.logs import LOG_FILE
from app.training.optimizers import (
    FAR,
    USUAL_LR,
    AdamWConfig,
    LearningRate,
    OptimizerConfig,
    format_lr,
    resolve_lr,
)
from common.facts import facts_of
from tests.conftest import read_column
from tests.tiny import train_into

METHODS = [LoraConfig(), Ia3Config(), FreezeConfig(), FullConfig()]


def resolve(
    adapter: AdapterConfig, batch: int = 8, *, from_scratch: bool = False, **optimizer: Any
) -> LearningRate:
    return resolve_lr(AdamWConfig(**optimizer), adapter, batch, from_scratch=from_scratch)


@pytest.mark.parametrize("adapter", METHODS, ids=lambda adapter: adapter.name)
def test_the_default_is_that_of_the_method_and_is_named(adapter: AdapterConfig) -> None:
    lr = resolve(adapter)
    default = DEFAULT_LR[adapter.name]
    assert lr.value == default
    assert lr.sentence == (
        f"lr {format_lr(default)} ({format_lr(default)} is the default of adapter={adapter.name})"
    )
    assert lr.warning is None


def test_the_help_of_the_learning_rate_names_the_defaults() -> None:
    doc = docs_of(OptimizerConfig)["lr"]
    (note,) = (facts_of(each).note for each in fields(OptimizerConfig) if each.name == "lr")
    known = {name: format_lr(lr) for name, lr in DEFAULT_LR.items()}
    assert f"LoRA {known['lora']}, IA3 {known['ia3']}, freeze and full {known['full']}" in doc
    assert known["freeze"] == known["full"]
    assert note == f"{known['lora']} for LoRA, {known['full']} for full"


def test_a_typed_learning_rate_overrides_the_default() -> None:
    lr = resolve(LoraConfig(), lr=3e-3)
    assert lr == LearningRate(3e-3, "lr 3e-3", None)


def test_the_sum_of_a_scaled_rate_is_written_out() -> None:
    lr = resolve(LoraConfig(), 64, lr=2e-4, scale_lr="sqrt")
    assert lr.value == pytest.approx(2e-4 * math.sqrt(8))
    assert lr.sentence == "lr 2e-4 x sqrt(64 / 8) = 5.66e-4"
    lr = resolve(LoraConfig(), 4, scale_lr="linear", base_batch_size=16)
    assert lr.value == pytest.approx(5e-5)
    assert lr.sentence == "lr 2e-4 x (4 / 16) = 5e-5 (2e-4 is the default of adapter=lora)"


@pytest.mark.parametrize("scale", ["none", "linear", "sqrt"])
def test_the_base_batch_size_leaves_the_rate_as_it_is(scale: str) -> None:
    assert resolve(LoraConfig(), 8, lr=1e-4, scale_lr=scale).value == 1e-4


@pytest.mark.parametrize("adapter", METHODS, ids=lambda adapter: adapter.name)
def test_a_rate_is_doubted_from_ten_times_outside_of_the_usual_range_on(
    adapter: AdapterConfig,
) -> None:
    lowest, highest = USUAL_LR[adapter.name]
    assert lowest <= DEFAULT_LR[adapter.name] <= highest
    for inside in (lowest / FAR * 1.01, lowest, highest, highest * FAR * 0.99):
        assert resolve(adapter, lr=inside).warning is None, inside
    above, below = (
        resolve(adapter, lr=lr).warning for lr in (highest * FAR * 1.1, lowest / FAR / 1.1)
    )
    assert above and below
    for warning, where in ((above, "11 times above"), (below, "11 times below")):
        assert warning.startswith("warning: learning rate ")
        assert where in warning
        assert f"adapter={adapter.name} ({format_lr(lowest)} to {format_lr(highest)})" in warning
        assert f"type optimizer.lr={format_lr(DEFAULT_LR[adapter.name])}" in warning


def test_a_rate_that_scaling_made_too_large_is_doubted_and_from_scratch_none_is() -> None:
    assert resolve(FullConfig(), lr=5e-5).warning is None
    scaled = resolve(FullConfig(), 512, lr=5e-5, scale_lr="linear")
    assert scaled.warning is not None and "3.2e-3" in scaled.warning
    assert "optimizer.scale_lr=none" in scaled.warning
    assert resolve(FullConfig(), lr=3e-3).warning is not None
    assert resolve(FullConfig(), lr=3e-3, from_scratch=True).warning is None


@pytest.mark.parametrize(
    ("value", "text"),
    [(2e-4, "2e-4"), (5.656e-4, "5.66e-4"), (3e-3, "3e-3"), (0.01, "0.01"), (1.0, "1"), (0, "0")],
)
def test_rates_are_written_as_people_write_them(value: float, text: str) -> None:
    assert format_lr(value) == text
    assert float(text) == pytest.approx(value, rel=1e-2)


def test_a_run_scales_by_all_packs_of_a_step_and_says_what_it_does(tmp_path: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        train_into(
            tmp_path / "run",
            "optimizer.scale_lr=sqrt",
            "optimizer.lr=1e-2",
            "adapter.lora_plus_ratio=4",
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
    row = next(line for line in details if re.search(r"q_proj +lora B", line))
    assert "0.0283" in row
