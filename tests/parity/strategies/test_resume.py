"""A killed run resumes bit for bit under its own strategy, and with equal losses under others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.parity.strategies.layouts import (
    ADAPTERS,
    LAYOUTS,
    NO_ENVIRONMENT,
    SINGLE,
    STAGES,
    TOPK,
    Layout,
    Runs,
    check_same_results,
    sliced,
)
from tests.runs import rows_of

DROPOUT = ("adapter=lora", "adapter.dropout=0.1", "optimizer.lr=1e-3")
LOCAL_STEPS = ("strategy.replicas=2", "strategy.synchronous_steps=1", "strategy.sync_every_steps=2")
"""averages weights after step 3, which comes after the checkpoint, and after the last one"""
OUTER = (*LOCAL_STEPS, "strategy.outer_lr=0.7", "strategy.outer_momentum=0.9")
LOCAL = {
    "mean": Layout(strategy="hsdp_local_sgd", words=LOCAL_STEPS),
    "outer": Layout(strategy="hsdp_local_sgd", words=OUTER),
    "shards": Layout(strategy="hsdp_local_sgd", ranks=4, num_data_ranks=4, words=OUTER),
}
ALL = LAYOUTS | {
    "single": SINGLE,
    "stages": STAGES,
    "four stages": replace(STAGES, ranks=4, num_data_ranks=2),
    "slices": sliced("ddp"),
    "four slices": sliced("fsdp", ranks=4, size=4),
}
slow, strategies = pytest.mark.slow, pytest.mark.strategies


def param(mark: Any, *values: object) -> Any:
    return pytest.param(*values, marks=mark)


@strategies
@pytest.mark.parametrize(
    ("words", "strategy"),
    [
        *((DROPOUT, strategy) for strategy in LAYOUTS),
        *(
            (ADAPTERS["full"], each)
            for each in ("zero2", "zero3", "fsdp", "fsdp_grad_op", "fsdp_tp")
        ),
    ],
)
def test_the_same_strategy_resumes_bit_for_bit(
    words: tuple[str, ...], strategy: str, runs: Runs
) -> None:
    runs.kill_and_resume(LAYOUTS[strategy], *words)


@slow
def test_stages_resume_bit_for_bit(runs: Runs) -> None:
    runs.kill_and_resume(STAGES, *DROPOUT, rank=1)


@slow
def test_slices_resume_bit_for_bit(runs: Runs) -> None:
    words = (*DROPOUT, *runs.long_rows())
    runs.kill_and_resume(sliced("ddp"), *words)
    first, second = random_states(runs.train(sliced("ddp"), *words), 4)
    assert first != second  # other tokens, other dropout masks


@pytest.mark.parametrize("asynchronous", [param(strategies, "false"), param(slow, "true")])
def test_topk_resumes_bit_for_bit(asynchronous: str, runs: Runs) -> None:
    words = (*ADAPTERS["lora"], f"trainer.checkpoint.async={asynchronous}")
    assert "top-k starts without" not in runs.kill_and_resume(TOPK, *words)


@pytest.mark.parametrize(
    "kind", [param(strategies, "mean"), param(slow, "outer"), param(strategies, "shards")]
)
def test_local_sgd_resumes_bit_for_bit_between_averages(kind: str, runs: Runs) -> None:
    assert "starts from the mean" not in runs.kill_and_resume(LOCAL[kind], *ADAPTERS["lora"])


@pytest.mark.parametrize(
    ("adapter", "chain"),
    [
        param(
            slow,
            "lora",
            ["four slices", "zero3", "fsdp_tp", "four stages", "single"],
        ),
        *(
            param(strategies, adapter, chain)
            for adapter in ("lora", "full")
            for chain in (
                ["fsdp", "zero3", "ddp", "tp", "single", "zero1", "fsdp_hybrid", "zero3_offload"],
                ["zero2_offload", "fsdp_tp", "single", "tp", "ddp", "zero3", "fsdp", "zero2"],
            )
        ),
    ],
)
def test_another_strategy_resumes_with_the_same_losses(
    adapter: str, chain: list[str], runs: Runs
) -> None:
    run = runs.new_folder("chain")
    words = (*ADAPTERS[adapter], *runs.long_rows(), "trainer.max_steps=8")
    often = (*words, "trainer.checkpoint.every_steps=1", "resume=auto")
    for number, strategy in enumerate(chain[:-1], 1):
        layout, step = ALL[strategy], 8 * number // len(chain)
        killed = runs.typed(layout, *often, f"faults=[rank_killed:0@{step}]")
        runs.shell.train_into(run, *killed, code=layout.code_of_a_kill)
        assert last_step(run) == step
        if strategy.endswith("tp"):  # ranks of a group drop out alike
            first, second, *_ = random_states(run, step)
            assert first == second
    runs.shell.train_into(run, *runs.typed(ALL[chain[-1]], *often))
    check_same_results(run, runs.train(SINGLE, *words))


@slow
def test_local_sgd_and_topk_resume_from_each_other(runs: Runs) -> None:
    words = (*ADAPTERS["lora"], "resume=auto", "resume_allow=[precision]")
    often = "trainer.checkpoint.every_steps=1"
    run = runs.new_folder("mean")
    first = runs.typed(LOCAL["mean"], *words, often, "faults=[rank_killed:0@2]")
    runs.shell.train_into(run, *first, code=NO_ENVIRONMENT)
    measured = rows_of(run)[-1]
    assert measured["step"] == "2" and measured["val/loss"]
    second = runs.typed(TOPK, *words, often, "faults=[rank_killed:0@3]")
    output = runs.shell.train_into(run, *second, code=NO_ENVIRONMENT)
    assert "top-k starts without" in output
    assert "lossy communication was the averaging of weights every 2 steps" in output
    third = runs.typed(LOCAL["outer"], *words)
    assert "every node starts from the mean" in runs.shell.train_into(run, *third)


def random_states(run: Path, step: int) -> list[str]:
    """Return the state of each rank's random numbers in a checkpoint."""
    files = sorted((run / "checkpoints" / f"step-{step}").glob("random-rank-*.json"))
    return [json.loads(file.read_text())["torch"] for file in files]


def last_step(run: Path) -> int:
    """Return the step of the newest checkpoint."""
    return max(int(folder.name.removeprefix("step-")) for folder in run.glob("checkpoints/step-*"))
