"""Multimodal checkpoints: only the language model is trained; saved files fit the full model."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file

from app.model.adapter.apply import apply_adapter
from app.model.adapter.saved import probe_logits, save_adapter
from app.model.adapter.settings import AdapterConfig, FullConfig, Ia3Config, LoraConfig
from app.model.architecture import load_architecture
from app.model.base import ModelConfig, load_base
from app.model.multimodal import tower_modules
from app.model.save import write_model
from app.planning.planned_model import model_from_modules
from common.errors import UserError
from tests.multimodal import tiny_multimodal, whole_class
from tests.tiny import move, probe, save_with_tokenizer

SLOW = ("gemma4", "llama4", "llava_next", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "voxtral")
FAMILIES = [
    "gemma3",
    "mistral3",
    *(pytest.param(f, marks=[pytest.mark.slow, pytest.mark.versions]) for f in SLOW),
]


@cache
def whole_model(family: str) -> Any:
    return tiny_multimodal(family)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("multimodal")


@pytest.fixture
def base(bases: Path, family: str) -> Path:
    """The folder that the whole model of a family is saved in."""
    if not (bases / family).exists():
        save_with_tokenizer(whole_model(family), bases / family)
    return bases / family


def opened(folder: Path, *, on_meta: bool = False) -> Any:
    return load_base(ModelConfig(path=str(folder)), "eager", torch.float32, on_meta=on_meta)


def is_of_language_model(name: str) -> bool:
    return "language_model" in name or "lm_head" in name


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_language_model_is_loaded(family: str, base: Path) -> None:
    whole = whole_model(family)
    for model in (opened(base), opened(base, on_meta=True)):
        names = {name for name, _ in model.named_parameters()}
        assert names == {name for name, _ in whole.named_parameters() if is_of_language_model(name)}
        assert tower_modules(model)
        planned = model_from_modules("", model, {})
        assert planned is not None
        assert planned.num_weights == sum(weight.numel() for weight in model.parameters())
    assert torch.equal(probe_logits(opened(base), probe()), probe_logits(whole, probe()))


@pytest.mark.parametrize(
    ("family", "config"),
    [
        *((family, LoraConfig(r=4)) for family in ("gemma3", "mistral3", "qwen3_5")),
        ("gemma3", Ia3Config()),
    ],
)
def test_an_adapter_fits_the_whole_model(config: AdapterConfig, base: Path, tmp_path: Path) -> None:
    model = move(apply_adapter(opened(base), config, half_precision=False))
    save_adapter(model, tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert saved and all(is_of_language_model(name) for name in saved)
    architecture = load_architecture(ModelConfig(path=str(base)))
    whole = whole_class(architecture).from_pretrained(base, dtype=torch.float32)
    stock = peft.PeftModel.from_pretrained(whole, tmp_path)
    added = [name for name, _ in stock.named_parameters() if ".lora_" in name or ".ia3_" in name]
    assert all(is_of_language_model(name) for name in added)
    assert torch.allclose(probe_logits(stock, probe()), probe_logits(model, probe()), atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_model_is_saved_with_its_towers(family: str, base: Path, tmp_path: Path) -> None:
    (base / "preprocessor_config.json").write_text('{"do_resize": true}')
    model = move(apply_adapter(opened(base), FullConfig(), half_precision=False))
    write_model(model, tmp_path, torch.float32)
    stock, loading = type(whole_model(family)).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    before, ours = dict(whole_model(family).named_parameters()), dict(model.named_parameters())
    for name, weight in stock.named_parameters():
        assert torch.equal(weight, ours[name] if is_of_language_model(name) else before[name]), name
    # Equal weights: what is left is fp32's rounding, of which processors differ in how much.
    expected, found = probe_logits(stock, probe()), probe_logits(model, probe())
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (tmp_path / "preprocessor_config.json").read_text() == '{"do_resize": true}'
    # What was saved is a base again, and so is its copy.
    write_model(opened(tmp_path), tmp_path / "copy", torch.float32)
    last = "model-00002-of-00002.safetensors"
    assert load_file(tmp_path / last).keys() == load_file(tmp_path / "copy" / last).keys()


@pytest.mark.parametrize("family", ["gemma3"])
def test_a_tower_cannot_be_targeted(base: Path) -> None:
    config = LoraConfig(r=4, target_modules=r".*vision_tower.*q_proj")
    with pytest.raises(UserError, match=r"matches no linear module.*without model.vision_tower,"):
        apply_adapter(opened(base), config, half_precision=False)
