"""Runs whose ranks hold slices of the same rows have the metrics and files of one process."""

from __future__ import annotations

import json

import pytest

from tests.parity.strategies import leaking_ranks, on_small_gpus
from tests.parity.strategies.layouts import (
    ADAPTERS,
    CLIPPED,
    SINGLE,
    Layout,
    Runs,
    check_same_results,
    sliced,
)
from tests.runs import check_same_run

CASES = {  # ddp: test_rows_that_auto_splits_train_as_one_process
    "fsdp": (sliced("fsdp"), "lora"),
    "zero3": (sliced("zero3"), "full"),
    "fsdp 2 x 2": (sliced("fsdp", ranks=4), "full"),
    # Three ranks cannot share four heads, and gather keys.
    "ddp of three": (sliced("ddp", ranks=3, size=3), "lora"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_slices_train_as_one_process(name: str, runs: Runs) -> None:
    layout, adapter = CASES[name]
    words = (*ADAPTERS[adapter], CLIPPED, *runs.long_rows)
    check_same_results(runs.train(layout, *words), runs.train(SINGLE, *words))


@pytest.mark.slow
def test_rounded_weights_are_measured_as_by_one_process(runs: Runs) -> None:
    words = (*ADAPTERS["full"], "output.dtype=bf16", *runs.long_rows)
    sliced_run, whole = (
        json.loads((runs.train(layout, *words) / "metrics.json").read_text())["tuned/val/loss"]
        for layout in (sliced("fsdp"), SINGLE)
    )
    assert sliced_run == pytest.approx(whole, rel=1e-4)  # other last digits round otherwise


@pytest.mark.slow
def test_rows_that_auto_splits_train_as_one_process(runs: Runs) -> None:
    words = (*ADAPTERS["lora"], CLIPPED, *runs.long_rows, "recompute=none")
    layout = Layout(strategy="auto", words=("trainer.micro_batch_size=1",))
    run = runs.new_folder("auto")
    output = runs.shell.train_into(run, *runs.typed(layout, *words), module=on_small_gpus.MODULE)
    assert "ddp strategy.context_parallel_size=2 (2 ranks that share each row of 256" in output
    check_same_results(run, runs.train(SINGLE, *words))


@pytest.mark.slow
def test_a_leak_between_documents_over_ranks_stops_the_run(runs: Runs) -> None:
    run = runs.new_folder("leak")
    words = runs.typed(sliced("ddp"), *ADAPTERS["lora"], *runs.long_rows)
    output = runs.shell.train_into(run, *words, module=leaking_ranks.MODULE, code=2)
    assert "an edit of a document on one rank changes the logits of another document" in output
    assert not (run / "checkpoints").exists()


@pytest.mark.slow
def test_a_killed_run_resumes_bit_for_bit(runs: Runs) -> None:
    words = ("adapter=lora", "adapter.dropout=0.1", "optimizer.lr=1e-3", *runs.long_rows)
    layout = sliced("ddp")
    run, reference = runs.new_folder("sliced-killed"), runs.train(layout, *words)
    killed = runs.typed(layout, *words, "resume=auto", "faults=[rank_killed:0@6]")
    runs.shell.train_into(run, *killed, code=layout.code_of_a_kill)
    runs.shell.train_into(run, *killed)
    check_same_run(run, reference)
    states = [
        json.loads((run / "checkpoints" / "step-8" / f"random-rank-{rank}.json").read_text())
        for rank in (0, 1)
    ]
    assert states[0]["torch"] != states[1]["torch"]  # other tokens, other dropout masks
