"""Strategies for slow networks: top-k and local SGD, their equivalences and resumes."""

from __future__ import annotations

import pytest

from tests.parity.strategies.layouts import (
    ADAPTERS,
    LAYOUTS,
    NO_ENVIRONMENT,
    SINGLE,
    Layout,
    Runs,
    check_same_results,
)
from tests.runs import check_same_run, rows_of
from tests.tiny import SAMPLES

TOPK = Layout(
    strategy="ddp_compressed", words=("strategy.compression=topk", "strategy.topk_share=0.05")
)
LOCAL_STEPS = ("strategy.synchronous_steps=1", "strategy.sync_every_steps=4")
"""averages weights after step 5 and after the last one"""
OUTER = ("strategy.outer_lr=0.7", "strategy.outer_momentum=0.9")
LOCAL = {
    "mean": Layout(strategy="hsdp_local_sgd", words=("strategy.replicas=2", *LOCAL_STEPS)),
    "outer": Layout(strategy="hsdp_local_sgd", words=("strategy.replicas=2", *LOCAL_STEPS, *OUTER)),
    "shards": Layout(
        strategy="hsdp_local_sgd",
        ranks=4,
        num_data_ranks=4,
        words=("strategy.replicas=2", *LOCAL_STEPS, *OUTER),
    ),
}


@pytest.mark.slow
def test_topk_with_share_1_equals_ddp(runs: Runs) -> None:
    words = ADAPTERS["lora"]
    run = runs.train(TOPK, *words, "strategy.topk_share=1")
    check_same_results(run, runs.train(LAYOUTS["ddp"], *words))


@pytest.mark.parametrize(
    "asynchronous",
    [
        pytest.param("false", marks=pytest.mark.strategies),
        pytest.param("true", marks=pytest.mark.slow),
    ],
)
def test_a_killed_topk_run_resumes_bit_for_bit(asynchronous: str, runs: Runs) -> None:
    words = (*ADAPTERS["lora"], f"trainer.checkpoint.async={asynchronous}")
    reference = runs.train(TOPK, *words)
    run = runs.new_folder("killed")
    killed = runs.typed(TOPK, *words, "resume=auto", "faults=[rank_killed:0@6]")
    runs.shell.train_into(run, *killed, code=NO_ENVIRONMENT)
    output = runs.shell.train_into(run, *killed)
    assert "top-k starts without" not in output
    check_same_run(run, reference)


@pytest.mark.parametrize(
    "ranks",
    [pytest.param(2, marks=pytest.mark.strategies), pytest.param(4, marks=pytest.mark.slow)],
)
def test_synchronous_steps_equal_those_of_one_process(ranks: int, runs: Runs) -> None:
    layout = Layout(
        strategy="hsdp_local_sgd",
        ranks=ranks,
        num_data_ranks=ranks,
        words=("strategy.replicas=2", "strategy.synchronous_steps=1000"),
    )
    # A typed number of steps that are all synchronous would be refused.
    words = (*ADAPTERS["lora"], "trainer.max_grad_norm=0.3", "trainer.max_steps=null")
    few = f"data.datasets=[{{path: {SAMPLES / 'orders_test.jsonl'}, name: orders, max_rows: 60}}]"
    words = (*words, "trainer.num_epochs=1", few)
    check_same_results(runs.train(layout, *words), runs.train(SINGLE, *words))


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("mean", marks=pytest.mark.strategies),
        pytest.param("outer", marks=pytest.mark.slow),
        pytest.param("shards", marks=pytest.mark.strategies),  # of replicas with an outer step
    ],
)
def test_local_sgd_resumes_bit_for_bit_between_averages(kind: str, runs: Runs) -> None:
    """The checkpoint is from step 4, between two averages."""
    words = ADAPTERS["lora"]
    reference = runs.train(LOCAL[kind], *words)
    run = runs.new_folder("killed-apart")
    killed = runs.typed(LOCAL[kind], *words, "resume=auto", "faults=[rank_killed:0@6]")
    runs.shell.train_into(run, *killed, code=NO_ENVIRONMENT)
    output = runs.shell.train_into(run, *killed)
    assert "starts from the mean" not in output
    check_same_run(run, reference)


@pytest.mark.slow
def test_local_sgd_and_topk_resume_from_each_other(runs: Runs) -> None:
    words = (*ADAPTERS["lora"], "resume=auto", "resume_allow=[precision]")
    run = runs.new_folder("mean")
    first = runs.typed(LOCAL["mean"], *words, "faults=[rank_killed:0@4]", "trainer.max_steps=8")
    often = "trainer.checkpoint.every_steps=1"
    runs.shell.train_into(run, *first, often, code=NO_ENVIRONMENT)
    measured = rows_of(run)[-1]
    assert measured["step"] == "4" and measured["val/loss"]
    second = runs.typed(TOPK, *words, "faults=[rank_killed:0@6]")
    output = runs.shell.train_into(run, *second, often, code=NO_ENVIRONMENT)
    assert "top-k starts without" in output
    assert "lossy communication was the averaging of weights every 4 steps" in output
    third = runs.typed(LOCAL["outer"], *words)
    assert "every node starts from the mean" in runs.shell.train_into(run, *third)
