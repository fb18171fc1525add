"""Base vs tuned: coverage of the intervals, verdicts, the table, the exit code of a regression."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.evaluation import significance
from app.evaluation.significance import (
    Change,
    RowScores,
    change_metrics,
    check_regression,
    compare_rows,
    comparison_rows,
    paired_bootstrap,
    report_comparison,
    scores_in_lines,
    verdict_line,
    wilson_interval,
)
from common.errors import TrainingFault, exit_code

LOSS = Change(measure="val/loss", name="orders", base=0.2, tuned=0.7, low=0.4, high=0.6,
              num_rows=100, num_changed=100, is_trained=False)  # fmt: skip


def compared(base: list[float], tuned: list[float], weights: list[float] | None = None) -> Change:
    of_base, of_tuned = (RowScores(scores=s, weights=weights) for s in (base, tuned))
    (change,) = compare_rows({"val/loss": {"a": of_base}}, {"val/loss": {"a": of_tuned}})
    return change


@pytest.fixture
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer resamples, so that coverage can be counted over many intervals."""
    monkeypatch.setattr(significance, "NUM_RESAMPLES", 500)


@pytest.mark.usefixtures("few_resamples")
def test_intervals_cover_the_true_difference() -> None:
    random, truth, covered, studies = np.random.default_rng(7), 0.3, 0, 300
    for _ in range(studies):
        tokens = random.integers(1, 40, 60).astype(float)
        differences = truth + random.standard_gamma(2, 60) - 2  # skewed
        low, high = paired_bootstrap(differences, tokens, 0.9)
        covered += low <= truth <= high
    assert covered / studies == pytest.approx(0.9, abs=0.04)


@pytest.mark.usefixtures("few_resamples")
def test_chance_differences_are_rarely_significant() -> None:
    random, wrong, studies = np.random.default_rng(2), 0, 150
    for _ in range(studies):
        base, tuned = (random.random((8, 40)) < 0.5 for _ in range(2))
        one, other = (
            {
                "exact_match": {
                    str(n): RowScores(scores=row) for n, row in enumerate(s.astype(float))
                }
            }
            for s in (base, tuned)
        )
        wrong += verdict_line(compare_rows(one, other)) != "no difference"
    # With 8 separate 95 % intervals, a third of all studies would have one that excludes 0.
    assert wrong / studies < 0.1


@pytest.mark.usefixtures("few_resamples")
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_intervals_do_not_depend_on_row_order_or_a_common_offset(data: st.DataObject) -> None:
    scores = st.floats(0, 10, allow_subnormal=False)
    rows = data.draw(st.lists(st.tuples(scores, scores, st.integers(1, 50)), min_size=1))
    mixed = data.draw(st.permutations(rows))
    one, other = (
        compared(*(list(column) for column in zip(*some, strict=True))) for some in (rows, mixed)
    )
    assert (one.low, one.high, one.verdict) == (other.low, other.high, other.verdict)
    assert one.low <= one.high
    assert one.base == pytest.approx(other.base)


def test_equal_scores_and_rounding_noise_are_no_difference() -> None:
    same = [1.0, 2.0, 0.5] * 20
    assert compared(same, same).verdict == "no difference"
    noise = [loss - 2e-5 for loss in same]  # on every row, as from another precision
    assert compared(same, noise).verdict == "no difference"
    assert compared(same, [loss - 2e-3 for loss in same]).verdict == "better"


def test_few_rows_are_not_significant_even_if_all_agree() -> None:
    # Every resample has the same sign, but a sign test of five rows has p = 6 %.
    of_five = compared([1.0] * 5, [0.0] * 5)
    assert of_five.verdict == "too few rows"
    assert verdict_line([of_five]) == "too few rows to tell (5; at least 6 are compared)"
    assert compared([1.0] * 6, [0.0] * 6).verdict == "better"
    of_many = compared([1.0] * 100, [1.0] * 95 + [0.0] * 5)
    assert verdict_line([of_five, of_many]) == "no difference"
    assert of_many.verdict == "too few differ"
    assert not (of_many.is_better or of_many.is_worse)


def test_intervals_stay_within_the_possible_difference() -> None:
    base, tuned = RowScores(scores=[0.0] * 4), RowScores(scores=[1.0, 1.0, 1.0, 0.0])
    of_shares, of_others = (
        compare_rows({name: {"orders": base}}, {name: {"orders": tuned}})[0]
        for name in ("exact_match", "my_metric")
    )
    assert (of_shares.difference, of_shares.high) == (0.75, 1.0) and of_others.high > 1.0
    assert of_shares.low == of_others.low


def test_rows_are_weighted_by_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    change = compared([1.0, 3.0], [2.0, 3.0], [3.0, 1.0])
    assert (change.base, change.tuned, change.difference) == (1.5, 2.25, 0.75)
    differences, tokens = np.repeat([1.0, 0.0], 20), np.repeat([3.0, 1.0], 20)
    low, high = paired_bootstrap(differences, tokens)
    assert low < 0.75 < high and (low + high) / 2 == pytest.approx(0.75, abs=0.05)
    random = np.random.default_rng(3)
    differences, tokens = random.normal(0.1, 1, 4000), random.integers(1, 9, 4000).astype(float)
    one_by_one = paired_bootstrap(differences, tokens)
    monkeypatch.setattr(significance, "MAX_UNITS", 500)  # many rows are resampled in groups
    assert paired_bootstrap(differences, tokens) == pytest.approx(one_by_one, abs=0.01)


def test_worse_data_sets_that_were_not_trained_on_are_forgotten() -> None:
    rows = {"val/loss": {n: RowScores(scores=[1.0] * 20) for n in ("lists", "orders", "people")}}
    worse = RowScores(scores=[1.5] * 20)
    tuned = {"val/loss": {"lists": RowScores(scores=[0.5] * 20), "orders": worse, "people": worse}}
    changes = compare_rows(rows, tuned, trained={"lists", "people"})
    assert [change.verdict for change in changes] == ["better", "forgotten", "worse"]
    assert verdict_line(changes) == (
        "better on lists (loss); worse on people (loss); forgot orders (loss), not trained on"
    )
    assert verdict_line(compare_rows(rows, tuned)) == (  # without the names of the training data
        "better on lists (loss); worse on orders (loss), people (loss)"
    )
    assert change_metrics(changes)["change/val/loss/lists"] == -0.5
    assert change_metrics(changes)["change/val/loss/orders/low"] == 0.5


def test_scores_of_rows_are_read_from_predictions() -> None:
    def line(name: str, tokens: int, **metrics: dict[str, float]) -> dict[str, object]:
        return {"data_set": name, "tokens": tokens, "metrics": metrics}

    lines = [
        line("arc", 3, accuracy={"base": 0.0, "tuned": 1.0}, loss={"base": 2.0, "tuned": 1.0}),
        line("arc", 1, accuracy={"base": 1.0, "tuned": 1.0}, loss={"base": 4.0}),
    ]
    base, tuned = (scores_in_lines(lines, variant) for variant in ("base", "tuned"))
    assert (base["loss"]["arc"].scores, base["loss"]["arc"].weights) == ([2.0, 4.0], [3.0, 1.0])
    assert tuned.keys() == {"accuracy"}  # one row has no loss
    (change,) = compare_rows(base, tuned)
    assert (change.base, change.tuned, change.num_rows) == (0.5, 1.0, 2)
    one = {"exact_match": {"a": RowScores(scores=[1.0])}}
    assert compare_rows({"exact_match": {"a": RowScores(scores=[])}}, one) == []
    with pytest.raises(ValueError, match="1 rows of the base, but 2 of the tuned model"):
        compare_rows(one, {"exact_match": {"a": RowScores(scores=[1.0, 0.0])}})


def test_a_regression_ends_with_exit_code_4() -> None:
    check_regression([LOSS], None)
    check_regression([LOSS], 0.4)  # within the interval
    check_regression([replace(LOSS, low=-0.1)], 0.0)
    check_regression([replace(LOSS, tuned=0.1, low=-0.6, high=-0.4)], 0.0)
    judged = replace(LOSS, measure="judge", base=8.0, tuned=7.0, low=-1.5, high=-0.5)
    check_regression([judged], 0.05)  # a judge's scale has ten points
    answers = replace(LOSS, measure="exact_match", base=0.9, tuned=0.5, low=-0.5, high=-0.3)
    with pytest.raises(TrainingFault) as failed:
        check_regression([LOSS, judged, answers], 0.04)
    assert exit_code(failed.value) == 4
    assert str(failed.value).splitlines() == [
        "the tuned model is worse than its base by more than evaluation.max_regression=0.04",
        "orders: loss 0.2000 -> 0.7000, worse by at least 0.4000",
        "orders: judge's score 8.00 -> 7.00, worse by at least 0.50",
        "orders: exact match 90.0 % -> 50.0 %, worse by at least 30.0 %",
    ]


def test_a_model_with_nonfinite_scores_is_worse() -> None:
    change = compared([1.0] * 20, [1.0] * 19 + [math.nan])
    assert change.is_worse and change.verdict != "no difference"
    with pytest.raises(TrainingFault, match="worse than its base"):
        significance.check_regression([change], 0.5)


def test_the_interval_of_a_share_is_wilsons() -> None:
    # Its ends p solve (p - share)^2 = z^2 p (1 - p) / n.
    for share in (0.0, 0.5, 0.8, 1.0):
        for end in wilson_interval(share, np.ones(30)):
            assert (end - share) ** 2 == pytest.approx(1.959964**2 * end * (1 - end) / 30, abs=1e-9)
    assert wilson_interval(0.8, np.ones(30)) == pytest.approx((0.6269, 0.9049), abs=1e-4)
    uneven = np.array([2.0] * 15 + [0.0] * 40)  # rows without a weight say nothing
    assert wilson_interval(0.8, uneven) == pytest.approx(wilson_interval(0.8, np.ones(15)))


METRICS = {
    "base/val/loss/lists": 7.01,
    "tuned/val/loss/lists": 0.25,
    "base/exact_match/lists": 0.015,
    "tuned/exact_match/lists": 0.96,
    "tuned/val/loss/people": 1.5,
}


def rows_of(metrics: dict[str, float], *changes: Change) -> list[list[str]]:
    return [row for _, row in comparison_rows(metrics, changes)]


def test_the_table_shows_base_next_to_tuned_and_a_dash_for_a_missing_value() -> None:
    assert rows_of(METRICS) == [
        ["lists", "loss", "7.0100", "0.2500", "-6.7600", "-", "-"],
        ["lists", "exact match", "1.5 %", "96.0 %", "+94.5 %", "-", "-"],
        ["people", "loss", "-", "1.5000", "-", "-", "-"],
    ]
    accuracy = {"": 0.8, "_low": 0.6269, "_high": 0.9049}
    metrics = {f"tuned/val/accuracy{end}/pairs": value for end, value in accuracy.items()}
    assert rows_of(metrics)[0][:5] == ["pairs", "accuracy", "-", "80.0 % (62.7 % to 90.5 %)", "-"]


def test_what_is_compared_row_by_row_has_its_interval_and_verdict() -> None:
    """Also without metrics of its own: a judge's grades of all questions are those of its mean."""
    loss = Change(measure="val/loss", name="lists", base=7.0, tuned=0.5, low=-7.0, high=-6.0,
                  num_rows=50, num_changed=50)  # fmt: skip
    grades = replace(loss, measure="judge", name="mt_bench", low=-6.9)
    first, *_, last = rows_of(METRICS, loss, grades)
    assert first[2:] == ["7.0100", "0.2500", "-6.5000", "-7.0000 to -6.0000", "better"]
    assert last == ["mt_bench", "judge's score", "7.00", "0.50", "-6.50", "-6.90 to -6.00", "worse"]


def test_what_is_printed_and_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report_comparison({"speed/tokens_per_second": 1.0}, [], [], tmp_path)
    assert "not compared: no rows were held out" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    points = {"base/points/old[new]": 0.7, "tuned/points/old[new]": 0.4}
    task = Change(measure="points", name="old[new]", base=0.7, tuned=0.4, low=-0.4, high=-0.2,
                  num_rows=100, num_changed=100, is_trained=False)  # fmt: skip
    hidden = {"tuned/val/f1_a/x": 0.5}
    report_comparison(
        METRICS | points | hidden, [task], [replace(task, name="old/group")], tmp_path
    )
    printed = capsys.readouterr().out
    assert "old[new]" in printed, "rich would read it as a style"
    assert "verdict: forgot old[new] (points), not trained on" in printed
    content = json.loads((tmp_path / "verdict.json").read_text())
    assert content["table"][-1] == [
        "old/group", "points", "0.7000", "0.4000", "-0.3000", "-0.4000 to -0.2000", "forgotten"
    ]  # fmt: skip
    assert [row["name"] for row in content["changes"]] == ["old[new]"]
    assert ["all", "val/f1_a/x", "-", "0.5000", "-", "-", "-"] in content["table"]
