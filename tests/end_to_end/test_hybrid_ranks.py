"""Hybrid bases on several ranks: mixers read weights that a strategy has sharded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.families import tiny_family
from tests.reliability.shell import Shell
from tests.runs import figures_of
from tests.tiny import save_with_tokenizer, small_run

pytestmark = pytest.mark.slow

RUN = (
    "trainer.max_steps=2",
    "trainer.accelerator=cpu",
    "adapter=lora",
    "adapter.r=4",
    "evaluation.max_rows=3",
    "evaluation.max_new_tokens=8",
    "logger=csv",
)
ADAPTER = "adapter/adapter_model.safetensors"


@pytest.mark.parametrize(("family", "strategy"), [("qwen3_5_text", "zero3"), ("falcon_h1", "fsdp")])
def test_two_ranks_give_the_figures_and_weights_of_one(
    family: str, strategy: str, shell: Shell, tmp_path: Path
) -> None:
    if strategy == "zero3":
        pytest.importorskip("deepspeed")
    base = save_with_tokenizer(
        tiny_family(family, vocab_size=768, max_position_embeddings=256), tmp_path / "base"
    )
    words = (*RUN, f"model.path={base}")
    one, two = tmp_path / "one", tmp_path / "two"
    shell.train_into(one, *small_run(*words, "trainer.gradient_accumulation_steps=2"))
    expected, theirs = figures_of(one), load_file(one / ADAPTER)
    ranks = ("trainer.devices=2", "trainer.gradient_accumulation_steps=1")
    shell.train_into(two, *small_run(*words, *ranks, f"strategy={strategy}"))
    for figure, value in figures_of(two).items():
        assert value == pytest.approx(expected[figure], rel=1e-5, abs=1e-5), figure
    mine = load_file(two / ADAPTER)
    assert mine.keys() == theirs.keys()
    assert all(torch.allclose(mine[name], theirs[name], atol=1e-4) for name in theirs)
