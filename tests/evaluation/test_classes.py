"""F1, AUC and confusion equal their definitions, pair by pair and row by row."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from app.evaluation.metrics import area_under_curve, class_metrics, confusion, confusion_cells


@pytest.mark.parametrize("seed", range(5))
def test_the_auc_is_the_share_of_rightly_ranked_pairs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores, is_positive = rng.integers(0, 6, 40) / 5, rng.random(40) < 0.3
    ranked = [
        (p > n) + 0.5 * (p == n)
        for p, n in itertools.product(scores[is_positive], scores[~is_positive])
    ]
    assert area_under_curve(scores, is_positive) == pytest.approx(np.mean(ranked))


def test_f1_and_auc_are_means_over_the_classes_that_occur() -> None:
    names = ["a", "b", "c", "never"]
    labels = np.array([0, 0, 0, 1, 1, 2])
    guesses = np.array([0, 0, 1, 1, 2, 1])
    outputs = np.random.default_rng(0).random((4, 6))
    outputs[guesses, range(6)] += 2.0
    found = class_metrics(outputs, labels, names)
    # a: precision 1, recall 2/3; b: precision 1/3, recall 1/2; c: none of its rows is found.
    assert found == pytest.approx(
        {"f1_a": 0.8, "f1_b": 0.4, "f1_c": 0.0, "f1": 0.4, "auc": found["auc"]}
    )
    shares = np.exp(outputs) / np.exp(outputs).sum(0)
    areas = [area_under_curve(shares[index], labels == index) for index in range(3)]
    assert found["auc"] == pytest.approx(np.mean(areas))
    counts = confusion(outputs, labels)
    assert counts.tolist() == [[2, 1, 0, 0], [0, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    assert confusion_cells(counts, names)[:2] == [["class", *names], ["a", "2", "1", "0", "0"]]


def test_the_classes_of_rows_with_several_are_measured_each_alone() -> None:
    outputs = np.array([[1.0, -1.0, 2.0, -2.0], [3.0, 1.0, -1.0, -2.0]])
    found = class_metrics(outputs, np.array([1, 3, 1, 0]), ["a", "b"], is_multi_label=True)
    # a is in rows 0 to 2 and guessed in 0 and 2; b is in row 1 and guessed in 0 and 1.
    expected = {"f1_a": 4 / 5, "f1_b": 2 / 3, "f1": (4 / 5 + 2 / 3) / 2}
    assert found == pytest.approx(expected | {"auc": (3 / 3 + 2 / 3) / 2})
    assert class_metrics(-abs(outputs), np.zeros(4, int), ["a", "b"], is_multi_label=True) == {}


def test_rows_of_one_class_have_no_auc() -> None:
    outputs = np.array([[2.0, 2.0], [0.0, 0.0]])
    found = class_metrics(outputs, np.array([0, 0]), ["a", "b"])
    assert found == {"f1_a": 1.0, "f1": 1.0}
