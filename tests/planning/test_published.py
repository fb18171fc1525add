"""Plans agree with what others published for their programs."""

from __future__ import annotations

from benchmarks.planning.published import compare


def test_published_rows() -> None:
    """Memory within 10 %; speed within 15 % for four of five rows, and none promised by 20 %."""
    plans = compare()
    errors = {plan.row.source: plan.memory_error for plan in plans if plan.memory_error is not None}
    assert len(errors) >= 5
    assert {name: error for name, error in errors.items() if abs(error) > 0.1} == {}
    ratios = {plan.row.source: plan.speed_ratio for plan in plans if plan.speed_ratio is not None}
    assert len(ratios) >= 25, "names of rows differ"
    assert {name: ratio for name, ratio in ratios.items() if ratio > 1.2} == {}
    near = [name for name, ratio in ratios.items() if abs(ratio - 1) <= 0.15]
    assert len(near) >= 0.8 * len(ratios), sorted(set(ratios) - set(near))
