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
    check_same_files,
    check_same_results,
    check_same_steps,
)
from tests.tiny import save_with_tokenizer

pytestmark = pytest.mark.slow

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


def words_of(mixtures: dict[str, Path], kind: str, *words: str) -> tuple[str, ...]:
    return (*ADAPTERS["lora"], f"model.path={mixtures[kind]}", "adapter.experts=lora", *words)


@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_lora_on_experts(strategy: str, runs: Runs, mixtures: dict[str, Path]) -> None:
    words = words_of(mixtures, "qwen3_moe")
    check_same_results(runs.train(LAYOUTS[strategy], *words), runs.train(SINGLE, *words))


def test_nf4_experts(runs: Runs, mixtures: dict[str, Path]) -> None:
    words = words_of(mixtures, "qwen3_moe", "quantization=nf4")
    check_same_results(runs.train(LAYOUTS["fsdp"], *words), runs.train(SINGLE, *words))


def test_recompute(runs: Runs, mixtures: dict[str, Path]) -> None:
    words = words_of(mixtures, "qwen3_moe")
    check_same_results(
        runs.train(SINGLE, *words, "recompute=selective"), runs.train(SINGLE, *words)
    )


def split(ranks: int, experts: int) -> Layout:
    """Return a layout of `ranks`, of which `experts` neighbours hold different experts."""
    words = (f"strategy.expert_parallel_size={experts}",)
    return replace(LAYOUTS["fsdp"], ranks=ranks, num_data_ranks=ranks, words=words)


@pytest.mark.parametrize(
    ("kind", "layout", "words"),
    [
        ("qwen3_moe", split(2, 2), (*ADAPTERS["full"], "model.router_aux_loss=0.01", CLIPPED)),
        ("deepseek_v3", split(4, 2), (*ADAPTERS["lora"], "adapter.experts=lora")),
    ],
)
def test_experts_on_different_ranks(
    kind: str, layout: Layout, words: tuple[str, ...], runs: Runs, mixtures: dict[str, Path]
) -> None:
    words = (*words, f"model.path={mixtures[kind]}")
    check_same_results(runs.train(layout, *words), runs.train(SINGLE, *words))


def test_resumed_with_other_experts(runs: Runs, mixtures: dict[str, Path]) -> None:
    run, words = runs.new_folder("experts"), words_of(mixtures, "qwen3_moe")
    often = (*words, "trainer.checkpoint.every_steps=1", "resume=auto")
    for layout, step in ((split(2, 2), 2), (SINGLE, 4)):
        killed = runs.typed(layout, *often, f"faults=[rank_killed:0@{step}]")
        runs.shell.train_into(run, *killed, code=layout.code_of_a_kill)
    runs.shell.train_into(run, *runs.typed(split(4, 2), *often))
    reference = runs.train(SINGLE, *words)
    check_same_steps(run, reference)
    check_same_files(run, reference)
