"""The table of base vs tuned, and the names of its metrics."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from app.evaluation.comparison import comparison_table, print_comparison
from app.evaluation.evaluator import prefix_metrics
from app.model.adapter import LoraConfig, apply_adapter, probe_logits
from tests.tiny import probe, tiny_llama

METRICS = {
    "base/val/loss/lists": 7.01,
    "tuned/val/loss/lists": 0.25,
    "base/exact_match/lists": 0.015,
    "tuned/exact_match/lists": 0.96,
    "tuned/val/loss/people": 1.5,
}


def drawn(metrics: dict[str, float], names: list[str]) -> list[list[str]]:
    """Cells of the comparison table, the headings first."""
    return cells(comparison_table(metrics, names))


def cells(table: Table) -> list[list[str]]:
    """Cells of a table, the headings first."""
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table)
    lines = [line for line in console.export_text().splitlines() if line[:1] in "│┃"]
    rows = [line.replace("┃", "│").strip("│").split("│") for line in lines]
    return [[cell.strip() for cell in row] for row in rows]


def test_metrics_are_prefixed_with_the_variant() -> None:
    metrics = {"val/loss": 1.0, "val/loss/a": 2.0, "exact_match/a": 0.5}
    perplexities = {"val/perplexity": math.exp(1.0), "val/perplexity/a": math.exp(2.0)}
    both = {f"base/{name}": value for name, value in (metrics | perplexities).items()}
    assert prefix_metrics("base", metrics) == both
    tuned = {name.replace("base", "tuned"): value for name, value in both.items()}
    losses = {"val/loss": 1.0, "val/loss/a": 2.0}
    assert prefix_metrics("tuned", metrics) == tuned | losses


def test_the_table_shows_base_next_to_tuned_and_a_dash_for_a_missing_value() -> None:
    assert drawn(METRICS, ["lists", "people"]) == [
        ["data set", "loss: base", "tuned", "exact match: base", "tuned"],
        ["lists", "7.0100", "0.2500", "1.5 %", "96.0 %"],
        ["people", "-", "1.5000", "-", "-"],
    ]


def test_the_table_of_a_base_alone() -> None:
    assert drawn({"base/val/loss/lists": 7.01}, ["lists"]) == [
        ["data set", "loss: base", "tuned"],
        ["lists", "7.0100", "-"],
    ]


def test_an_accuracy_is_shown_with_its_interval() -> None:
    accuracy = {"": 0.8, "_low": 0.6269, "_high": 0.9049}
    metrics = {f"tuned/val/accuracy{end}/pairs": value for end, value in accuracy.items()}
    assert drawn({"tuned/val/loss/pairs": 0.5} | metrics, ["pairs"]) == [
        ["data set", "loss: base", "tuned", "accuracy: base", "tuned"],
        ["pairs", "-", "0.5000", "-", "80.0 % (62.7 % to 90.5 %)"],
    ]


def test_separate_held_out_files_come_last() -> None:
    metrics = METRICS | {"base/exact_match/held_out": 0.0, "tuned/exact_match/held_out": 0.5}
    table = drawn(metrics, ["lists", "people"])
    assert [row[0] for row in table] == ["data set", "lists", "people", "held_out"]
    assert table[-1] == ["held_out", "-", "-", "0.0 %", "50.0 %"]


def test_data_set_names_are_not_markup(capsys: pytest.CaptureFixture[str]) -> None:
    print_comparison({"tuned/val/loss/old[new]": 0.5}, ["old[new]"])
    printed = capsys.readouterr().out
    assert "base vs tuned" in printed
    assert "old[new]" in printed  # rich would parse it as a style


def test_a_disabled_adapter_gives_the_base() -> None:
    model: Any = apply_adapter(tiny_llama(), LoraConfig(r=4), half_precision=False)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.fill_(0.1)
    tuned, base = probe_logits(model, probe()), probe_logits(tiny_llama(), probe())
    assert not tuned.equal(base)
    with model.disable_adapter():
        assert probe_logits(model, probe()).equal(base)
    assert probe_logits(model, probe()).equal(tuned)
