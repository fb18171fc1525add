"""A hybrid (attention and Mamba 2 in every layer) learns the sample lists by LoRA and QLoRA."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, FalconH1Config, FalconH1ForCausalLM

from app.config import run_verb
from app.evaluate import evaluate
from tests.reliability.person import Person
from tests.tiny import SAMPLES, TINY_BASE, save_with_tokenizer

RENAMED = {
    ".mlp.": ".feed_forward.",
    ".post_attention_layernorm.": ".pre_ff_layernorm.",
    "model.norm.": "model.final_layernorm.",
}


def save_hybrid(folder: Path) -> Path:
    """The tiny base with a random Mamba 2 beside the attention of each layer."""
    dense = AutoModelForCausalLM.from_pretrained(TINY_BASE, dtype=torch.float32)
    numbers = dense.config.to_dict()
    for name in ("model_type", "architectures", "dtype", "head_dim"):
        numbers.pop(name, None)
    torch.manual_seed(0)
    hybrid = FalconH1ForCausalLM(
        FalconH1Config(
            **numbers, mamba_d_ssm=128, mamba_n_heads=4, mamba_d_state=16, mamba_chunk_size=64
        )
    )
    weights = dense.state_dict()
    for old, new in RENAMED.items():
        weights = {name.replace(old, new): weight for name, weight in weights.items()}
    missing, unexpected = hybrid.load_state_dict(weights, strict=False)
    assert not unexpected and all(".mamba." in name for name in missing)
    return save_with_tokenizer(hybrid, folder)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["none", "nf4"])
def test_a_hybrid_overfits_the_lists(method: str, person: Person, tmp_path: Path) -> None:
    base, run = save_hybrid(tmp_path / "base"), tmp_path / "run"
    lists = SAMPLES / "lists.json"
    person.train_into(
        run,
        "+experiment=quickstart",
        f"model.path={base}",
        f"data.datasets=[{{path: {lists}, name: lists}}]",
        f"data.test_datasets=[{{path: {SAMPLES / 'lists_test.json'}, name: lists}}]",
        f"quantization={method}",
        "trainer.max_steps=60",
        "evaluation.max_rows=60",
    )
    reopened = tmp_path / "evaluated"
    assert run_verb("evaluate", evaluate, words=[f"run={run}", f"output.dir={reopened}"]) == 0
    measured = json.loads((reopened / "metrics.json").read_text())
    assert measured["base/exact_match/lists"] < 0.10
    assert measured["tuned/exact_match/lists"] > 0.90
    trained = load_file(run / "adapter" / "adapter_model.safetensors")
    assert any(".mamba." in name and weight.any() for name, weight in trained.items())
