"""The learning rate's shapes, against numbers written by hand and against torch's own."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from app.training.optimizers import SHAPES, ScheduleConfig, build_schedule, lr_factor


def fall(progress: float, least: float = 0.0) -> float:
    """Return half a cosine from 1 to `least`."""
    return least + (1 - least) * 0.5 * (1 + math.cos(math.pi * progress))


WARM: dict[str, Any] = {"warmup_steps": 2, "min_lr_ratio": 0.1}
NONE: dict[str, Any] = {"warmup_steps": 0}
QUARTERS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.0)
CYCLE: dict[str, Any] = {"warmup_steps": 3, "start_lr_ratio": 0.2, "min_lr_ratio": 0.01}
CASES: dict[str, tuple[str, dict[str, Any], int, list[float]]] = {
    "warm-up": ("linear", {"warmup_steps": 4}, 20, [0.25, 0.5, 0.75, 1.0, 1.0]),
    "ratio": ("cosine", {"warmup_ratio": 0.5}, 20, [0.1]),
    "ratio, rounded up": ("cosine", {"warmup_ratio": 0.03}, 50, [0.5, 1.0]),
    "no ratio": ("cosine", {"warmup_ratio": 0.0}, 50, [1.0]),
    "steps before ratio": ("cosine", {"warmup_ratio": 0.5, "warmup_steps": 2}, 20, [0.5, 1.0]),
    "no steps before ratio": ("cosine", {"warmup_ratio": 0.5, **NONE}, 20, [1.0]),
    "constant": ("constant", {**NONE, "min_lr_ratio": 0.1}, 10, [1.0] * 11),
    "linear": ("linear", NONE, 4, [1 - at for at in QUARTERS]),
    "cosine": ("cosine", NONE, 4, [fall(at) for at in QUARTERS]),
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
    # The peak with the third step, the minimum with the seventh, half of a cosine each way.
    "one_cycle": (
        "one_cycle",
        CYCLE,
        7,
        [0.2, 0.6, 1.0, *(fall(at, 0.01) for at in QUARTERS[1:]), 0.01],
    ),
    "one_cycle that falls": ("one_cycle", {**NONE, "min_lr_ratio": 0.01}, 3, [1.0, 0.505, 0.01]),
    "one_cycle of a step": ("one_cycle", NONE, 1, [1.0]),
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


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_stays_between_nothing_and_the_peak_for_any_length(shape: str) -> None:
    for total, warmup in itertools.product((1, 2, 3, 7), (0, 1, 2, 9)):
        config = ScheduleConfig(shape=shape, warmup_steps=warmup)
        factors = [lr_factor(step, total, config) for step in range(total)]
        assert all(0 <= factor <= 1 for factor in factors)
        assert factors[0] > 0
