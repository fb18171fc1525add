"""Models that are built in milliseconds, and runs of a few steps on the shipped samples."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.conftest import ROOT

SAMPLES = ROOT / "data_modules" / "samples"
TINY_BASE = SAMPLES / "tiny_base"
NAMES = ["lists", "orders"]
SMALL_RUN = {
    "model.path": str(TINY_BASE),
    "data.datasets": (
        f"[{{path: {SAMPLES / 'lists_test.json'}, name: lists}},"
        f" {{path: {SAMPLES / 'orders_test.jsonl'}, name: orders}}]"
    ),
    "data.val_set_size": "6",
    "data.sequence_len": "256",
    "trainer.max_steps": "4",
    "trainer.gradient_accumulation_steps": "2",
    "trainer.precision": "fp32",
}


def small_run(*words: str) -> list[str]:
    """Words of a run of four steps on two data sets; a word given here replaces the run's own."""
    chosen = SMALL_RUN | dict(word.split("=", 1) for word in words)
    return [f"{key}={value}" for key, value in chosen.items()]


def train_into(folder: Path, *words: str) -> Path:
    """Run `app.train` in this process, for fixtures that several tests share."""
    from app.config import load_config
    from app.train import train

    os.environ.pop("LOFT_RUN_DIR", None)
    train(load_config("train", [*small_run(*words), f"output.dir={folder}"]))
    os.environ.pop("LOFT_RUN_DIR", None)
    return folder


def tiny_llama(*, seed: int = 0, **numbers: Any) -> LlamaForCausalLM:
    """A random Llama of two layers, 64 tokens and a tied head, in fp32; `numbers` change it.

    Its weights are large enough for every token to have its own logits.
    """
    shape = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**(shape | numbers))).eval()


def random_ids(rows: int = 1, tokens: int = 16) -> torch.Tensor:
    """Token ids [rows, tokens] of `tiny_llama`, the same in every call."""
    return torch.randint(3, 64, (rows, tokens), generator=torch.Generator().manual_seed(1))


def probe(rows: int = 1, tokens: int = 16) -> dict[str, torch.Tensor]:
    """`random_ids` by the name of the model's argument."""
    return {"input_ids": random_ids(rows, tokens)}
