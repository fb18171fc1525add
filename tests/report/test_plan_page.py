"""The page of a plan: tables and bars instead of text, and why the plan is not the fastest."""

from __future__ import annotations

import re
from typing import Any

import pytest

from app.config import load_config
from app.plan import make_plan
from app.report.plan import ASSUMED, MAX_ROWS, advice_lines, plan_lines, render_plan

PLANNED = ["+experiment=llama70b", "hardware=8xa100_80gb", "plan.tokens=1000000"]


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    return make_plan(load_config("plan", PLANNED))[0]


def test_a_page_has_all_alternatives_and_bars(facts: dict[str, Any]) -> None:
    page = render_plan(facts)
    num_parts = sum(bool(value) for value in facts["seconds"].values())
    assert page.count("<svg") == 1 + num_parts + len(facts["advice"])
    assert all(row["type"] in page for row in facts["advice"])
    assert len(facts["advice"]) > MAX_ROWS and "more on the page" not in page
    assert "<pre" not in page and "####" not in page
    widths = [float(width) for width in re.findall(r'width="([\d.]+)" height="1"', page)]
    assert sum(facts["gpu_gib"].values()) == pytest.approx(sum(widths[: len(facts["gpu_gib"])]))


def test_the_first_line_says_why_the_planned_settings_are_not_the_fastest(
    facts: dict[str, Any],
) -> None:
    fastest = next(row for row in facts["advice"] if row["fits"])
    assert fastest["tokens_per_second"] > 1.01 * facts["tokens_per_second"]
    (first, *_), page = plan_lines(facts), render_plan(facts)
    assert first.endswith(f"faster: type {fastest['type']}") and first in page
    settings = facts["settings"]
    assert f"quantization {settings['quantization']}, which a plan never changes" in first
    same = facts | {"tokens_per_second": fastest["tokens_per_second"]}
    assert "type" not in plan_lines(same)[0]
    too_large = facts | {"fits": False, "to_fit": ["quantization=nf4"]}
    assert plan_lines(too_large)[0] == "does not fit: type quantization=nf4"


def test_assumed_rates_are_called_so(facts: dict[str, Any]) -> None:
    lines, page = [*plan_lines(facts), *advice_lines(facts)], render_plan(facts)
    assert not any(row["is_assumed"] for row in facts["advice"])  # an A100 has no FP8 products
    assert not any(ASSUMED in each for each in (*lines, page))
    fastest = facts["advice"][0] | {"is_assumed": True, "type": "quantization=fp8"}
    assert fastest["fits"]
    proposed = facts | {"advice": [fastest, *facts["advice"][1:]]}
    assert plan_lines(proposed)[0].endswith(f"type quantization=fp8 ({ASSUMED})")
    assert f"  quantization=fp8: {ASSUMED}" in advice_lines(proposed)
    assert page.count(ASSUMED) == 0 and render_plan(proposed).count(ASSUMED) == 2
