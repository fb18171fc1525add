"""Ranks that hold slices of the same rows take the step of one process."""

from __future__ import annotations

import pytest

from app.model.description import BaseDescription
from app.preflight.files import check_context_parallel
from tests.ranks import on_ranks
from tests.strategy.context_training import (
    CASES,
    GPT2,
    HEAD_DIM,
    HEADS,
    KEY_HEADS,
    LLAMA,
    TOKENS,
    compare_all,
    refused_and_balanced,
)

FEW = ["llama", "lora, recompute", "window", "gpt2"]
MASKED = ("window", "gemma3")
"""cases that save a mask of a whole document"""


@pytest.mark.parametrize(("size", "cases"), [(2, list(CASES)), (4, FEW)])
def test_slices_give_the_loss_and_gradients_of_whole_rows(size: int, cases: list[str]) -> None:
    for found in on_ranks(size, compare_all, cases):
        for case, figures in found.items():
            assert figures["loss"] < 1e-6 and figures["sums"] < 1e-6, case
            assert figures["norm"] < 1e-6, case
            # The largest difference of one number is rounding that differs between CPUs.
            assert figures["gradients"] < 4e-6, case
            assert figures["saved"] < (1.1 + 0.15 * (case in MASKED)) / size, case
            if case in ("llama", "lora, recompute"):
                passes = 3 if "recompute" in case else 2
                assert figures["calls"] == 2 * passes * LLAMA["num_hidden_layers"]
                sent = bytes_of_layer(size) * passes * LLAMA["num_hidden_layers"]
                assert figures["bytes"] == sent, case


def bytes_of_layer(size: int) -> int:
    """Return the bytes that a rank sends in a layer's forward pass: queries, keys, values, out."""
    key_heads = max(KEY_HEADS, size)  # repeated, so that each rank has one
    features = (2 * HEADS + 2 * key_heads) * HEAD_DIM
    return TOKENS // size * features * 4 * (size - 1) // size


def test_layers_without_exchange_are_refused_and_routers_balance_whole_documents() -> None:
    for refusal, own, whole in on_ranks(2, refused_and_balanced):
        assert "strategy.context_parallel_size=2: slices of a row give other logits" in refusal
        assert own == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize(
    ("numbers", "size", "message"),
    [
        (LLAMA, 3, "does not divide the 8 attention heads of base (8 / 3 leaves 2); type strategy"),
        (GPT2, 16, "does not divide the 8 attention heads"),
        (LLAMA | {"layer_types": ["linear_attention"]}, 2, "base has linear_attention layers"),
        ({"model_type": "t5", "is_encoder_decoder": True}, 2, "t5 is an encoder-decoder; type"),
    ],
)
def test_bases_whose_rows_cannot_be_split_are_refused(
    numbers: dict[str, object], size: int, message: str
) -> None:
    base = BaseDescription(name="base", config=numbers)
    (problem,) = check_context_parallel(size, base)
    assert message in problem and "strategy.context_parallel_size=1" in problem
    assert check_context_parallel(1, base) == []
    assert check_context_parallel(4, BaseDescription(name="base", config=LLAMA)) == []
