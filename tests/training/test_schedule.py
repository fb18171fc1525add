"""The learning rate's shapes, against numbers written by hand and against torch's own."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from app.training.schedule import SHAPES, ScheduleConfig, build_schedule, lr_factor


def factors_of(total: int, config: ScheduleConfig) -> list[float]:
    return [lr_factor(step, total, config) for step in range(total)]


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "one_cycle"])
def test_the_warm_up_rises_evenly_and_reaches_the_peak_with_its_last_step(shape: str) -> None:
    factors = factors_of(20, ScheduleConfig(shape=shape, warmup_steps=4))
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert max(factors) == factors[4] == 1.0
    assert factors[0] > 0


@pytest.mark.parametrize("min_lr_ratio", [0.0, 0.1])
@pytest.mark.parametrize("shape", ["cosine", "linear"])
def test_the_rate_falls_to_its_minimum_at_the_last_step_of_all(
    shape: str, min_lr_ratio: float
) -> None:
    config = ScheduleConfig(shape=shape, warmup_steps=3, min_lr_ratio=min_lr_ratio)
    factors = [lr_factor(step, 23, config) for step in range(3, 24)]
    assert all(later < earlier for earlier, later in itertools.pairwise(factors))
    assert factors[-1] == pytest.approx(min_lr_ratio)
    assert factors[10] == pytest.approx((1 + min_lr_ratio) / 2)
    assert lr_factor(40, 23, config) == pytest.approx(min_lr_ratio)


def test_cosine_and_linear_differ_where_they_should() -> None:
    at_a_quarter = {
        shape: lr_factor(5, 20, ScheduleConfig(shape=shape, warmup_steps=0))
        for shape in ("cosine", "linear", "constant")
    }
    expected = {"cosine": 0.5 * (1 + 2**-0.5), "linear": 0.75, "constant": 1.0}
    assert at_a_quarter == pytest.approx(expected)


def test_constant_stays_at_the_peak() -> None:
    config = ScheduleConfig(shape="constant", warmup_steps=0, min_lr_ratio=0.1)
    assert {lr_factor(step, 10, config) for step in range(11)} == {1.0}


def test_warmup_steps_win_over_the_ratio() -> None:
    by_ratio = ScheduleConfig(warmup_ratio=0.5)
    assert lr_factor(0, 20, by_ratio) == pytest.approx(1 / 10)
    assert lr_factor(0, 20, ScheduleConfig(warmup_ratio=0.5, warmup_steps=2)) == 0.5
    assert lr_factor(0, 20, ScheduleConfig(warmup_ratio=0.5, warmup_steps=0)) == 1.0


def test_a_ratio_of_steps_is_rounded_up() -> None:
    config = ScheduleConfig(warmup_ratio=0.03)
    assert [lr_factor(step, 50, config) for step in range(2)] == [0.5, 1.0]
    assert lr_factor(0, 50, ScheduleConfig(warmup_ratio=0.0)) == 1.0


def test_wsd_warms_up_stays_and_falls_by_the_root_over_its_last_steps() -> None:
    config = ScheduleConfig(shape="wsd", warmup_steps=2, decay_ratio=0.2)
    factors = factors_of(20, config)
    assert factors[:2] == [0.5, 1.0]
    assert set(factors[2:17]) == {1.0}
    assert factors[17:] == pytest.approx([1 - 0.5, 1 - 2**-0.5, 1 - 0.75**0.5])
    assert lr_factor(20, 20, config) == lr_factor(30, 20, config) == 0.0


def test_wsd_ends_at_its_minimum_and_never_decays_within_the_warm_up() -> None:
    config = ScheduleConfig(shape="wsd", warmup_steps=0, decay_ratio=0.5, min_lr_ratio=0.1)
    assert lr_factor(10, 10, config) == pytest.approx(0.1)
    assert lr_factor(6, 10, config) == pytest.approx(0.1 + 0.9 * (1 - 0.2**0.5))
    late = ScheduleConfig(shape="wsd", warmup_steps=8, decay_ratio=0.5)
    factors = factors_of(10, late)
    assert factors[:9] == [(step + 1) / 8 for step in range(8)] + [1.0]
    assert factors[9] == pytest.approx(1 - 0.5**0.5)


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


def test_one_cycle_by_hand() -> None:
    config = ScheduleConfig(
        shape="one_cycle", warmup_steps=3, start_lr_ratio=0.2, min_lr_ratio=0.01
    )
    factors = factors_of(7, config)
    assert factors == pytest.approx(
        # the peak with the third step, the minimum with the seventh, half of a cosine each way
        [
            0.2,
            0.6,
            1.0,
            *(0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * i / 4)) for i in (1, 2, 3, 4)),
        ]
    )
    assert lr_factor(9, 7, config) == pytest.approx(0.01)
    without = ScheduleConfig(shape="one_cycle", warmup_steps=0, min_lr_ratio=0.01)
    assert factors_of(3, without) == pytest.approx([1.0, 0.505, 0.01])
    assert factors_of(1, without) == [1.0]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_stays_between_nothing_and_the_peak_for_any_length(shape: str) -> None:
    for total, warmup in itertools.product((1, 2, 3, 7), (0, 1, 2, 9)):
        factors = factors_of(total, ScheduleConfig(shape=shape, warmup_steps=warmup))
        assert all(0 <= factor <= 1 for factor in factors)
        assert factors[0] > 0
