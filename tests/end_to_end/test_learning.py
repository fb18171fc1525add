"""Quantized bases, mixtures and multimodal bases learn the sample lists.

parity/test_qlora.py and model/test_fp8.py: a step is that of the dequantized weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from app.config import run_verb
from app.evaluate import evaluate
from tests.multimodal import llava_of_the_tiny_base
from tests.reliability.shell import Shell
from tests.runs import adapter_of, metrics_of
from tests.tiny import SAMPLES, TINY_BASE, save_with_tokenizer

pytestmark = pytest.mark.slow

LISTS = ("lists.json", "lists_test.json")
NUM_EXPERTS = 4
NOISE = ("gemm_4bit", "bitsandbytes")
"""parts of bitsandbytes warnings, which are filtered"""


def save_mixture(folder: Path) -> Path:
    """Save the tiny base with four similar experts in place of each feed-forward."""
    dense = AutoModelForCausalLM.from_pretrained(TINY_BASE, dtype=torch.float32)
    weights, numbers = dense.state_dict(), dense.config.to_dict()
    for key in ("model_type", "architectures", "dtype", "attention_bias", "mlp_bias"):
        numbers.pop(key, None)
    torch.manual_seed(0)
    config = MixtralConfig(
        **numbers, num_local_experts=NUM_EXPERTS, num_experts_per_tok=2, sliding_window=None
    )
    mixture = MixtralForCausalLM(config)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind of base, and evidence that it was trained as such."""

    save: Callable[[Path], Path] = lambda _: TINY_BASE
    words: tuple[str, ...] = ()
    adapts: str
    """part of the name of an adapted module"""
    says: str = "adapter verified: reloaded logits match"


KINDS = {
    "quantized": Kind(words=("quantization=nf4",), adapts=".q_proj."),
    "mixture": Kind(
        save=save_mixture,
        words=("quantization=nf4", "adapter.experts=lora"),
        adapts=".experts.",
    ),
    "multimodal": Kind(
        save=llava_of_the_tiny_base,
        adapts=".language_model.",
        says="model.vision_tower, model.multi_modal_projector not loaded",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_of_bases_learn_the_lists(
    kind: str, shell: Shell, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    case = KINDS[kind]
    base, run = case.save(tmp_path / "base"), tmp_path / "run"
    rows, test_rows = (f"[{{path: {SAMPLES / file}, name: lists}}]" for file in LISTS)
    printed = shell.train_into(
        run,
        *("+experiment=quickstart", f"model.path={base}", "trainer.max_steps=60"),
        *(f"data.datasets={rows}", f"data.test_datasets={test_rows}"),
        *("evaluation.exact_match=false", *case.words),
    )
    assert case.says in printed

    def measure(name: str, *words: str) -> dict[str, float]:
        typed = [f"run={run}", *words, f"output.dir={tmp_path / name}"]
        typed += ["evaluation.exact_match=true", "evaluation.max_rows=30"]
        assert run_verb("evaluate", evaluate, words=typed) == 0
        return metrics_of(tmp_path / name)

    # Evaluate reopens the saved model.
    measured, trained = measure("reopened"), metrics_of(run)
    assert measured["base/exact_match/lists"] < 0.10
    assert measured["tuned/exact_match/lists"] > 0.90
    for name in ("base/val/loss", "tuned/val/loss"):
        assert measured[name] == pytest.approx(trained[name], rel=1e-5), name
    assert any(case.adapts in name and one.any() for name, one in adapter_of(run).items())
    printed += "".join(capfd.readouterr())
    assert not any(word in printed for word in NOISE)
    if kind == "quantized":
        full = measure("full", "quantization=none")
        assert full["tuned/exact_match/lists"] > 0.80
        assert full["base/val/loss"] != pytest.approx(measured["base/val/loss"], rel=1e-5)
