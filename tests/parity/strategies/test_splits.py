"""Runs whose ranks share rows or layers have the metrics and files of one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.parity.strategies import leaking_ranks, on_small_gpus
from tests.parity.strategies.layouts import (
    ADAPTERS,
    CLIPPED,
    SINGLE,
    STAGES,
    Layout,
    Runs,
    check_same_results,
    check_same_steps,
    rows_of,
    sliced,
)
from tests.runs import metrics_of
from tests.tiny import SAMPLES
from tests.training.test_kto import kto_file

pytestmark = pytest.mark.slow

FOUR = replace(STAGES, ranks=4, num_data_ranks=2)


@pytest.mark.parametrize(
    ("layout", "adapter"),
    [
        (sliced("zero3"), "full"),
        # Three ranks cannot share four heads, and gather keys.
        (sliced("ddp", ranks=3, size=3), "lora"),
    ],
    ids=["zero3", "ddp of three"],
)
def test_slices_train_as_one_process(layout: Layout, adapter: str, runs: Runs) -> None:
    runs.check_as_single(layout, *ADAPTERS[adapter], CLIPPED, *runs.long_rows())


def test_rounded_weights_are_measured_as_by_one_process(runs: Runs) -> None:
    words = (*ADAPTERS["full"], CLIPPED, "output.dtype=bf16", *runs.long_rows())
    run, whole = (runs.train(each, *words) for each in (sliced("fsdp", ranks=4), SINGLE))
    check_same_steps(run, whole)
    found, expected = (metrics_of(folder)["tuned/val/loss"] for folder in (run, whole))
    assert found == pytest.approx(expected, rel=1e-4)  # other last digits round otherwise


def test_rows_that_auto_splits_train_as_one_process(runs: Runs) -> None:
    words = (*ADAPTERS["lora"], CLIPPED, *runs.long_rows())
    layout = Layout(strategy="auto", words=("trainer.micro_batch_size=1", "recompute=none"))
    run = runs.new_folder("auto")
    output = runs.shell.train_into(run, *runs.typed(layout, *words), module=on_small_gpus.MODULE)
    assert "ddp strategy.context_parallel_size=2 (2 ranks that share each row of 256" in output
    check_same_results(run, runs.train(SINGLE, *words))


def test_a_leak_between_documents_over_ranks_stops_the_run(runs: Runs) -> None:
    run = runs.new_folder("leak")
    words = runs.typed(sliced("ddp"), *ADAPTERS["lora"], *runs.long_rows())
    output = runs.shell.train_into(run, *words, module=leaking_ranks.MODULE, code=2)
    assert "an edit of a document on one rank changes the logits of another document" in output
    assert not (run / "checkpoints").exists()


@pytest.mark.parametrize(
    ("layout", "adapter", "base", "words"),
    [
        (FOUR, "full", "untied", ()),
        # The first stage has nothing to train.
        (STAGES, "lora", "tied", ("quantization=nf4", "adapter.layers=top 1")),
    ],
    ids=["sharded stages", "nf4, top layer"],
)
def test_stages_train_as_one_process(
    layout: Layout, adapter: str, base: str, words: tuple[str, ...], runs: Runs
) -> None:
    runs.check_as_single(layout, *ADAPTERS[adapter], CLIPPED, runs.base(base), *words)


@pytest.mark.parametrize(
    ("objective", "layout"),
    [
        ("kto objective.reference=cached", STAGES),
        ("orpo", replace(FOUR, words=("strategy.schedule=interleaved",))),
    ],
)
def test_stages_learn_preferences_as_one_process(
    objective: str, layout: Layout, runs: Runs, tmp_path: Path
) -> None:
    rows = kto_file(tmp_path) if "kto" in objective else SAMPLES / "pairs.json"
    words = [f"data.datasets=[{{path: {rows}, max_rows: 120}}]", *ADAPTERS["lora"]]
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
