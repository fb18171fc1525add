"""Every architecture trains, saves and reopens; train and evaluate measure the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from app.model.adapter import load_adapter, probe_logits
from tests.in_process import run_into
from tests.runs import metrics_of
from tests.tiny import (
    probe_of,
    save_with_tokenizer,
    tiny_bart,
    tiny_gpt2,
    tiny_llama,
    tiny_t5,
    train_into,
)

pytestmark = pytest.mark.slow

SIZE = {"vocab_size": 768}
BASES: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: tiny_gpt2(**SIZE, n_positions=256),
    "tied": lambda: tiny_llama(**SIZE, max_position_embeddings=256),
    "untied": lambda: tiny_llama(**SIZE, max_position_embeddings=256, tie_word_embeddings=False),
    "t5": lambda: tiny_t5(**SIZE),
    "bart": lambda: tiny_bart(**SIZE, max_position_embeddings=256),
}
OTHERS = {"bart": ["packing=none", "recompute=full"]}  # does not accept position ids
ADAPTERS = {
    "lora": ["adapter=lora", "adapter.r=4"],
    "pissa": ["adapter=lora", "adapter.r=4", "adapter.init=pissa"],
    "ia3": ["adapter=ia3"],
    "freeze": ["adapter=freeze", "adapter.layers=top 1"],
    "full": ["adapter=full", "optimizer.lr=1e-3"],
}


CASES = [
    ("gpt2", "lora"),
    ("tied", "full"),
    ("tied", "pissa"),
    ("untied", "freeze"),
    ("t5", "ia3"),
    ("bart", "lora"),
]
"""each base and each adapter, and whole models with tied and untied heads"""


@pytest.mark.parametrize(("name", "adapter"), CASES)
def test_a_reopened_model_has_the_measured_losses(name: str, adapter: str, tmp_path: Path) -> None:
    base = save_with_tokenizer(BASES[name](), tmp_path / "base")
    run = train_into(
        tmp_path / "run",
        f"model.path={base}",
        *OTHERS.get(name, ["packing=multipack"]),
        "trainer.max_steps=2",
        "trainer.gradient_accumulation_steps=1",
        *ADAPTERS[adapter],
    )
    trained = metrics_of(run)
    run_into("evaluate", tmp_path / "evaluation", f"run={run}")
    again = metrics_of(tmp_path / "evaluation")
    assert "base/val/loss" in again and "tuned/val/loss" in again
    for figure, value in again.items():
        assert value == pytest.approx(trained[figure], rel=2e-5), figure
    assert abs(again["tuned/val/loss"] - again["base/val/loss"]) > 1e-4

    # Opened without this project's code, the folder contains the measured model.
    auto = AutoModelForSeq2SeqLM if name in ("t5", "bart") else AutoModelForCausalLM
    if adapter in ("full", "freeze"):
        reopened = auto.from_pretrained(run / "model", dtype=torch.float32)
        embedding, head = reopened.get_input_embeddings(), reopened.get_output_embeddings()
        assert (embedding.weight is head.weight) == (name != "untied")
    else:
        reopened = load_adapter(auto.from_pretrained(base), run / "adapter")
        assert json.loads((run / "adapter" / "base.json").read_text())["path"] == str(base)
    logits = probe_logits(reopened, probe_of(reopened))
    plain = auto.from_pretrained(base)
    assert not torch.allclose(logits, probe_logits(plain, probe_of(plain)), atol=1e-5)
