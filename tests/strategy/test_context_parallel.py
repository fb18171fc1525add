"""Ranks that hold slices of the same rows take the step of one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from app.assembly.base import open_base
from app.config import load_config
from app.model.attention import gather_reason, key_repeats
from app.model.description import BaseDescription
from app.preflight.files import check_split
from app.strategy.settings import DdpConfig
from app.training.trainer import resolve_environment
from tests.ranks import on_ranks
from tests.strategy import context_training as context

ON_FOUR_RANKS = ["llama", "odd heads, recompute", "mamba 2"]
RECURRENT = ("delta rule", "convolution", "mamba 2")
MASKED = ("window", "gemma3")
"""cases that save a mask of a whole document"""


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        (2, [case for case in context.CASES if case not in (*ON_FOUR_RANKS, "odd heads, gemma3")]),
        (4, [*ON_FOUR_RANKS, "odd heads, gemma3", "long rows"]),
    ],
)
def test_slices_give_the_loss_and_gradients_of_whole_rows(size: int, cases: list[str]) -> None:
    for found in on_ranks(size, context.compare_all, cases):
        for case, figures in found.items():
            assert figures["loss"] < 1e-6 and figures["sums"] < 1e-6, case
            assert figures["norm"] < (2e-6 if "odd" in case else 1e-6), case
            # In fp64, slices differ from one process only by what models compute in fp32 all the
            # same, such as norms. In fp32, rounding alone takes one process 0.7e-6 to 6e-6 away
            # from fp64, so that two computations may be twice as far apart.
            assert figures["exact"] < (4e-6 if "delta" in case else 1e-6), case
            bound = min(4e-6, max(2e-6, 2 * figures["rounding"]))
            assert figures["gradients"] < bound, case
            assert figures["saved"] < most_saved(case, size, figures["whole"]), case


def most_saved(case: str, size: int, whole: float) -> float:
    """Return a bound of the activations that a rank saves, of the `whole` bytes of one process."""
    numbers, _, recompute = context.CASES[case]
    bar = 0.51 if size == 2 else 0.26
    if recompute != "none" or case == "long rows":
        return bar
    if case.removeprefix("odd heads, ") in RECURRENT:  # each rank has the activations of whole rows
        return 0.8
    if case in MASKED or "odd" in case:  # masks of whole documents, or all keys and values
        return 1.25 / size
    # The output of attention is saved by head and by token, and repeated key heads are.
    heads = context.HEADS + 2 * (max(context.KEY_HEADS, size) - context.KEY_HEADS)
    layers = numbers.get("num_hidden_layers") or numbers["n_layer"]
    return bar + layers * context.TOKENS // size * heads * context.HEAD_DIM * 4 / whole


def test_the_way_is_chosen_by_heads_and_bytes() -> None:
    assert gather_reason(32, 8, 8) is None  # Llama 3.1 8B
    assert gather_reason(14, 2, 2) is None  # Qwen2.5 0.5B
    assert "4 ranks cannot share 14 attention heads" in str(gather_reason(14, 2, 4))
    assert "(1) to share: 2 heads to send instead of 34" in str(gather_reason(32, 1, 2))
    assert gather_reason(32, 8, 16) is None  # 48 heads instead of 128
    assert gather_reason(8, 2, 4) is None  # 12 instead of 8, by the fastest kernel
    assert key_repeats(16, 6, 2) == 2  # the mean of Gemma 4's layers, in a plan


def test_leaks_over_ranks_are_refused_and_slices_are_evaluated_as_whole_rows() -> None:
    for refusals, (whole, sliced), (whole_balance, balance) in on_ranks(
        2, context.refused_and_balanced
    ):
        for refusal in refusals:  # neither exchange nor boundaries; an exchange without boundaries
            assert "strategy.context_parallel_size=2: an edit of a document on one rank" in refusal
        assert ["slices of a row give other" in refusal for refusal in refusals] == [True, False]
        assert len(whole) >= 3 and sliced == pytest.approx(whole, rel=1e-6)
        assert balance == pytest.approx(whole_balance, rel=1e-6)


def test_bases_whose_rows_cannot_be_split_are_refused() -> None:
    split = DdpConfig(context_parallel_size=4)
    llama = BaseDescription(name="base", config=context.LLAMA)
    t5 = BaseDescription(name="base", config={"model_type": "t5"})
    for base, backend, message in (
        (t5, "sdpa", "t5 is an encoder-decoder;"),
        (llama, "eager", "which attention=eager cannot compute; type attention=sdpa or varlen"),
    ):
        (problem,) = check_split(split, base, backend)
        assert message in problem and "strategy.context_parallel_size=1" in problem
        assert check_split(DdpConfig(), base, backend) == []
    assert check_split(split, llama) == []


def test_slices_on_several_nodes_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    config: Any = load_config("train", ["experiment=quickstart", "trainer.accelerator=cpu"])
    env = replace(resolve_environment(config.trainer), devices=2, context_size=4)
    open_base(config, env, config.adapter)
    assert "splits rows over 2 nodes" in caplog.text
    assert "strategy.context_parallel_size=2 stays inside a node" in caplog.text
