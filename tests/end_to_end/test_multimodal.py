"""A multimodal checkpoint learns the sample run's tasks with its language model alone."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from app.config import load_config
from app.evaluate import evaluate
from app.model.adapter import probe_logits
from tests.multimodal import llava_of_the_tiny_base, tiny_multimodal
from tests.reliability.person import Person
from tests.runs import figures_of
from tests.tiny import probe, save_with_tokenizer, small_run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_it_learns_the_lists(quantization: str, person: Person, tmp_path: Path) -> None:
    base, run = llava_of_the_tiny_base(tmp_path / "llava"), tmp_path / "run"
    said = person.train_into(
        run,
        "+experiment=quickstart",
        f"model.path={base}",
        f"quantization={quantization}",
        "evaluation.max_rows=60",
    )
    assert "model.vision_tower, model.multi_modal_projector not loaded" in said
    again = tmp_path / "again"
    evaluate(load_config("evaluate", [f"run={run}", f"output.dir={again}"]))
    figures = json.loads((again / "metrics.json").read_text())
    assert figures["base/exact_match/lists"] < 0.1
    assert figures["tuned/exact_match/lists"] > 0.9


RUN = (
    "trainer.max_steps=2",
    "trainer.accelerator=cpu",
    "trainer.gradient_accumulation_steps=1",
    "evaluation.exact_match=true",
    "evaluation.max_rows=3",
    "evaluation.max_new_tokens=8",
    "logger=csv",
)


@pytest.mark.parametrize("adapter", ["lora", "full"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero3"])
def test_several_ranks_end_as_one(
    strategy: str, adapter: str, person: Person, tmp_path: Path
) -> None:
    if strategy == "zero3":
        pytest.importorskip("deepspeed")
    base = save_with_tokenizer(tiny_multimodal("mistral3"), tmp_path / "base")
    words = [*RUN, f"model.path={base}", f"adapter={adapter}"]
    if adapter == "lora":
        words += ["adapter.dropout=0", "adapter.r=4"]
    one, two = tmp_path / "one", tmp_path / "two"
    person.train_into(one, *small_run(*words, "trainer.gradient_accumulation_steps=2"))
    person.train_into(two, *small_run(*words, "trainer.devices=2", f"strategy={strategy}"))
    expected = figures_of(one)  # beside a whole model in parts there is no room for its base
    for figure, value in figures_of(two).items():
        assert value == pytest.approx(expected[figure], abs=1e-5), figure
    if adapter == "lora":
        name = "adapter/adapter_model.safetensors"
        mine, theirs = load_file(two / name), load_file(one / name)
        assert mine.keys() == theirs.keys()
        assert all(torch.allclose(mine[name], theirs[name], atol=1e-4) for name in theirs)
        whole = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
        probe_logits(peft.PeftModel.from_pretrained(whole, two / "adapter"), probe())
        return
    before = dict(AutoModelForImageTextToText.from_pretrained(base).named_parameters())
    opened, loading = AutoModelForImageTextToText.from_pretrained(
        two / "model", output_loading_info=True
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    for name, weight in opened.named_parameters():
        assert torch.equal(weight, before[name]) == (
            "language_model" not in name and "lm_head" not in name
        )
