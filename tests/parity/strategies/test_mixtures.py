"""Mixtures of experts: the same on several ranks as on one, which may hold different experts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.model.test_experts import tiny_mixture
from tests.parity.strategies.layouts import (
    ADAPTERS,
    CLIPPED,
    LAYOUTS,
    SHAPE,
    SINGLE,
    Layout,
    Runs,
    check_same_results,
)
from tests.tiny import save_with_tokenizer

pytestmark = pytest.mark.slow

LORA = (*ADAPTERS["lora"], "adapter.experts=lora")
BASES = {"qwen3_moe": {"head_dim": 16}, "deepseek_v3": {}}


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("mixtures")
    return {
        kind: save_with_tokenizer(
            tiny_mixture(kind, **(SHAPE | numbers), dtype=torch.float32), folder / kind
        )
        for kind, numbers in BASES.items()
    }


def split(ranks: int, experts: int) -> Layout:
    """Return a layout of `ranks`, of which `experts` neighbours hold different experts."""
    words = (f"strategy.expert_parallel_size={experts}",)
    return replace(LAYOUTS["fsdp"], ranks=ranks, num_data_ranks=ranks, words=words)


@pytest.mark.parametrize(
    ("kind", "layout", "words"),
    [
        ("deepseek_v3", LAYOUTS["zero3"], LORA),
        ("qwen3_moe", LAYOUTS["fsdp"], (*LORA, "quantization=nf4")),
        ("qwen3_moe", split(2, 2), (*ADAPTERS["full"], "model.router_aux_loss=0.01", CLIPPED)),
    ],
    ids=["zero3", "nf4", "experts on different ranks"],
)
def test_ranks_train_as_one_process(
    kind: str, layout: Layout, words: tuple[str, ...], runs: Runs, mixtures: dict[str, Path]
) -> None:
    runs.check_as_single(layout, *words, f"model.path={mixtures[kind]}")


def test_resumed_with_other_experts(runs: Runs, mixtures: dict[str, Path]) -> None:
    run, words = runs.new_folder("experts"), (*LORA, f"model.path={mixtures['deepseek_v3']}")
    often = (*words, "trainer.checkpoint.every_steps=1", "resume=auto")
    for layout, step in ((split(2, 2), 1), (SINGLE, 2)):
        killed = runs.typed(layout, *often, f"faults=[rank_killed:0@{step}]")
        runs.shell.train_into(run, *killed, code=layout.code_of_a_kill)
    runs.shell.train_into(run, *runs.typed(split(4, 2), *often))
    check_same_results(run, runs.train(SINGLE, *words))
