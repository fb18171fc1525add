"""A mixture of experts learns the sample lists by LoRA on its experts, and by QLoRA."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from app.config import run_verb
from app.evaluate import evaluate
from tests.reliability.person import Person
from tests.tiny import SAMPLES, TINY_BASE, save_with_tokenizer

NUM_EXPERTS = 4


def save_mixture(folder: Path) -> Path:
    """The tiny base with each feed-forward as four experts, near it but not alike."""
    dense = AutoModelForCausalLM.from_pretrained(TINY_BASE, dtype=torch.float32)
    numbers = dense.config.to_dict()
    for name in ("model_type", "architectures", "dtype", "attention_bias", "mlp_bias"):
        numbers.pop(name, None)
    torch.manual_seed(0)
    config = MixtralConfig(
        **numbers, num_local_experts=NUM_EXPERTS, num_experts_per_tok=2, sliding_window=None
    )
    mixture = MixtralForCausalLM(config)
    weights = dense.state_dict()
    with torch.no_grad():
        for name, weight in mixture.named_parameters():
            if name in weights:
                weight.copy_(weights[name])
            elif ".experts." in name:
                layer = name.partition(".experts.")[0]
                parts = ["down_proj"] if "down_proj" in name else ["gate_proj", "up_proj"]
                own = torch.cat([weights[f"{layer}.{part}.weight"] for part in parts])
                weight.copy_(own + 0.02 * own.std() * torch.randn_like(weight))
    return save_with_tokenizer(mixture, folder)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["none", "nf4"])
def test_a_mixture_overfits_the_lists(method: str, person: Person, tmp_path: Path) -> None:
    base, run = save_mixture(tmp_path / "base"), tmp_path / "run"
    lists = SAMPLES / "lists.json"
    person.train_into(
        run,
        "+experiment=quickstart",
        f"model.path={base}",
        f"data.datasets=[{{path: {lists}, name: lists}}]",
        f"data.test_datasets=[{{path: {SAMPLES / 'lists_test.json'}, name: lists}}]",
        "adapter.experts=lora",
        f"quantization={method}",
        "trainer.max_steps=200",
        "evaluation.max_rows=60",
    )
    reopened = tmp_path / "evaluated"
    assert run_verb("evaluate", evaluate, words=[f"run={run}", f"output.dir={reopened}"]) == 0
    measured = json.loads((reopened / "metrics.json").read_text())
    assert measured["base/exact_match/lists"] < 0.10
    assert measured["tuned/exact_match/lists"] > 0.90
    content = json.loads((run / "adapter" / "adapter_config.json").read_text())
    assert content["target_parameters"] == ["experts.down_proj", "experts.gate_up_proj"]
