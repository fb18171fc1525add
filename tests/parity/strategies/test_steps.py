"""Every strategy gives the same losses, validations and saved files.

Eight steps of the same global batches. `make test` runs some of these tests, `make test-all` more,
`make test-strategies` all.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.parity.strategies.layouts import (
    ADAPTERS,
    CLIPPED,
    LAYOUTS,
    NOT_CLIPPED,
    SINGLE,
    Runs,
    check_same_results,
)

IN_MAKE_TEST = {"lora": {"ddp", "fsdp"}, "full": set()}
IN_TEST_ALL = {
    "lora": {"zero2", "zero3", "tp", "fsdp_tp"},
    "full": {"fsdp"},
}


def cases(adapter: str) -> list[object]:
    """Return every strategy, marked by the command that runs it."""
    marks = {
        strategy: [pytest.mark.slow if strategy in IN_TEST_ALL[adapter] else pytest.mark.strategies]
        for strategy in LAYOUTS
    } | {strategy: [] for strategy in IN_MAKE_TEST[adapter]}
    return [pytest.param(strategy, marks=marks[strategy]) for strategy in LAYOUTS]


@pytest.mark.parametrize("strategy", cases("lora"))
def test_lora_accumulated_and_clipped(strategy: str, runs: Runs) -> None:
    words = (*ADAPTERS["lora"], CLIPPED)
    check_same_results(runs.train(LAYOUTS[strategy], *words), runs.train(SINGLE, *words))


@pytest.mark.parametrize("strategy", cases("full"))
def test_full_model_in_one_micro_batch(strategy: str, runs: Runs) -> None:
    words = (*ADAPTERS["full"], CLIPPED)
    run, reference = (
        runs.train(LAYOUTS[strategy], *words, accumulates=False),
        runs.train(SINGLE, *words),
    )
    check_same_results(run, reference)
    ids = torch.randint(3, 700, (2, 24), generator=torch.Generator().manual_seed(0))
    ours, expected = (
        AutoModelForCausalLM.from_pretrained(folder / "model").eval()(ids).logits
        for folder in (run, reference)
    )
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-2)


@pytest.mark.strategies
@pytest.mark.parametrize("strategy", list(LAYOUTS))
@pytest.mark.parametrize(
    ("adapter", "accumulates"),
    [("lora", False), ("full", True)],
    ids=["lora in one micro-batch", "full accumulated"],
)
def test_without_clipping(adapter: str, accumulates: bool, strategy: str, runs: Runs) -> None:
    words = (*ADAPTERS[adapter], NOT_CLIPPED)
    run = runs.train(LAYOUTS[strategy], *words, accumulates=accumulates)
    check_same_results(run, runs.train(SINGLE, *words))
