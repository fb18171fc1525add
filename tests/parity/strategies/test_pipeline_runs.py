"""Runs whose ranks hold stages of the model have the metrics and files of one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.parity.strategies.layouts import (
    ADAPTERS,
    CLIPPED,
    SINGLE,
    Layout,
    Runs,
    check_same_results,
    rows_of,
)
from tests.runs import check_same_run
from tests.tiny import SAMPLES
from tests.training.test_kto import kto_file

PAIR = Layout(strategy="fsdp_pp", num_data_ranks=1)
FOUR = replace(PAIR, ranks=4, num_data_ranks=2)
CASES = {
    "lora": (PAIR, "lora", "tied"),
    "full": (PAIR, "full", "tied"),
    "top layer": (PAIR, "top layer", "untied"),
    "sharded stages": (FOUR, "full", "untied"),
    "nf4": (PAIR, "lora", "tied"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_stages_train_as_one_process(name: str, runs: Runs) -> None:
    layout, adapter, base = CASES[name]
    words = (*ADAPTERS[adapter], CLIPPED, f"model.path={runs.bases[base]}")
    words += ("quantization=nf4",) if name == "nf4" else ()
    check_same_results(runs.train(layout, *words), runs.train(SINGLE, *words))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "layout"),
    [
        ("kto objective.reference=cached", PAIR),
        ("orpo", replace(FOUR, words=("strategy.schedule=interleaved",))),
    ],
)
def test_stages_learn_preferences_as_one_process(
    objective: str, layout: Layout, runs: Runs, tmp_path: Path
) -> None:
    rows = kto_file(tmp_path) if "kto" in objective else SAMPLES / "pairs.json"
    words = [
        f"data.datasets=[{{path: {rows}, max_rows: 120}}]",
        *ADAPTERS["lora"],
        "trainer.max_steps=4",
    ]
    words += [f"model.path={SAMPLES / 'tiny_base'}", *f"objective={objective}".split()]
    found, expected = (
        # Each with log-probabilities of its own.
        rows_of(runs.train(each, *words, f"data.cache_dir={tmp_path / each.strategy}"))
        for each in (layout, SINGLE)
    )
    assert len(found) == len(expected)
    for row, other in zip(found, expected, strict=True):
        assert row.keys() == other.keys()
        for key, value in row.items():
            near = pytest.approx(float(other[key] or "nan"), rel=1e-5, abs=1e-6, nan_ok=True)
            assert float(value or "nan") == near, (row["step"], key)


@pytest.mark.slow
def test_a_run_whose_last_stage_is_killed_resumes_bit_for_bit(runs: Runs) -> None:
    words = ("adapter=lora", "adapter.dropout=0.1", "optimizer.lr=1e-3")
    run, reference = runs.new_folder("stage-killed"), runs.train(PAIR, *words)
    killed = runs.typed(PAIR, *words, "resume=auto", "faults=[rank_killed:1@6]")
    runs.shell.train_into(run, *killed, code=PAIR.code_of_a_kill)
    runs.shell.train_into(run, *killed)
    check_same_run(run, reference)
