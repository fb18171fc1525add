"""Strategies for slow links, by the ordinary command: what they send less of, and their resume."""

from __future__ import annotations

import pytest

from tests.parity.strategies.layouts import (
    ADAPTERS,
    LAYOUTS,
    NO_ENVIRONMENT,
    Layout,
    Runs,
    check_alike,
)
from tests.runs import check_same_run

pytestmark = pytest.mark.slow

TOPK = Layout(
    strategy="ddp_compressed", words=("strategy.compression=topk", "strategy.topk_share=0.05")
)


def test_topk_that_sends_all_is_ddp(runs: Runs) -> None:
    words = ADAPTERS["lora"]
    run = runs.of(TOPK, *words, "strategy.topk_share=1")
    check_alike(run, runs.of(LAYOUTS["ddp"], *words))


@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_a_killed_run_of_topk_goes_on_bit_for_bit(asynchronous: str, runs: Runs) -> None:
    words = (*ADAPTERS["lora"], f"trainer.checkpoint.async={asynchronous}")
    whole = runs.of(TOPK, *words)
    run = runs.new_folder("killed")
    killed = runs.typed(TOPK, *words, "resume=auto", "faults=[rank_killed:0@6]")
    runs.person.train_into(run, *killed, code=NO_ENVIRONMENT)
    said = runs.person.train_into(run, *killed)
    assert "top-k starts without" not in said
    check_same_run(run, whole)


def test_other_ranks_start_without_what_was_not_sent(runs: Runs) -> None:
    words = ADAPTERS["lora"]
    run = runs.new_folder("fewer")
    killed = runs.typed(LAYOUTS["ddp"], *words, "resume=auto", "faults=[rank_killed:0@6]")
    runs.person.train_into(run, *killed, code=NO_ENVIRONMENT)
    again = runs.typed(TOPK, *words, "resume=auto", "resume_allow=[precision]")
    assert "top-k starts without" in runs.person.train_into(run, *again)
