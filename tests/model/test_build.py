"""The model that is trained is the base it was made from, and what is saved is what was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from app.model import save as saving
from app.model.adapter import AdapterConfig, FullConfig, LoraConfig, probe_logits
from app.model.architecture import load_architecture
from app.model.attention import attention_implementation
from app.model.base import ModelConfig, load_base
from app.model.build import load_tuned
from app.model.save import save_model
from common.errors import TrainingFault, UserError
from tests.tiny import built, move, probe, random_ids, tiny_llama

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PROBE = {"input_ids": random_ids()[0].tolist()}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_base(tmp_path / "base")


def save_base(folder: Path, dtype: torch.dtype = FP32, **numbers: Any) -> Path:
    tiny_llama(**numbers).to(dtype).save_pretrained(folder)
    return folder


def save(model: Any, adapter: AdapterConfig, base: Path, folder: Path) -> Path:
    """Save and verify what was built on `base`."""
    config = ModelConfig(path=str(base))
    saved, kept = save_model(
        model,
        adapter,
        load_architecture(config),
        folder,
        PROBE,
        base={"path": str(base)},
        reload_base=lambda: load_base(config, attention_implementation("sdpa"), FP32),
    )
    assert kept is model
    return saved


@pytest.mark.parametrize(
    ("precision", "adapter", "frozen", "trained"),
    [
        ("fp32", LoraConfig(r=4), FP32, FP32),
        ("bf16", LoraConfig(r=4), BF16, FP32),
        ("fp16", LoraConfig(r=4), FP16, FP32),
        ("bf16-pure", LoraConfig(r=4), BF16, BF16),
        ("bf16", FullConfig(), None, FP32),
        ("bf16-pure", FullConfig(), None, BF16),
    ],
)
def test_a_built_model_has_the_dtypes_of_its_precision(
    precision: str,
    adapter: AdapterConfig,
    frozen: torch.dtype | None,
    trained: torch.dtype,
    base: Path,
) -> None:
    model = built(base, adapter=adapter, precision=precision)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {trained}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == ({frozen} - {None})
    assert model.training


def test_from_scratch_builds_the_architecture_with_random_weights() -> None:
    architecture = tiny_llama(num_hidden_layers=3, hidden_size=16).config.to_dict()
    numbers = {key: architecture[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")}
    config = ModelConfig(
        from_scratch=True, architecture={"model_type": "llama", "num_attention_heads": 2, **numbers}
    )
    given = dict(config.architecture)
    models = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        models.append(load_base(config, attention_implementation("sdpa"), FP32))
    model = models[0]
    assert isinstance(model, LlamaForCausalLM)
    assert len(model.model.layers) == 3
    assert model.get_input_embeddings().weight.shape == (64, 16)
    weights = [m.model.layers[0].mlp.up_proj.weight for m in models]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert config.architecture == given
    assert load_architecture(config).num_hidden_layers == 3


def test_a_base_that_lacks_a_tensor_is_refused_and_not_filled_with_random_numbers(
    base: Path,
) -> None:
    file = base / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    said = r"not in the files, first model\.layers\.1\.mlp\.up_proj\.weight"
    with pytest.raises(UserError, match=said):
        load_base(ModelConfig(path=str(base)), "sdpa", FP32)


def test_after_saving_the_model_in_memory_is_the_saved_one_in_the_dtype_of_its_training(
    tmp_path: Path,
) -> None:
    base = save_base(tmp_path / "base", BF16)
    model = move(built(base, adapter=FullConfig(), precision="bf16"))
    exact = model.model.rotary_emb.inv_freq.clone()
    saved = save(model, FullConfig(), base, tmp_path)
    assert {parameter.dtype for parameter in model.parameters()} == {FP32}
    # Rotary frequencies are no weights: rounded to bf16 they would move every position.
    assert model.model.rotary_emb.inv_freq.dtype is FP32
    assert torch.equal(model.model.rotary_emb.inv_freq, exact)
    loaded = load_tuned(ModelConfig(path=str(base)), saved, attention_implementation("sdpa"), FP32)
    assert torch.equal(probe_logits(loaded, probe()), probe_logits(model, probe()))


def test_an_adapter_is_saved_beside_no_base_and_found_again(base: Path, tmp_path: Path) -> None:
    model = move(built(base))
    saved = save(model, LoraConfig(), base, tmp_path)
    assert saved == tmp_path / "adapter"
    assert not (tmp_path / "model").exists()
    config = json.loads((saved / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    loaded = load_tuned(ModelConfig(path=str(base)), saved, attention_implementation("sdpa"), FP32)
    assert torch.equal(probe_logits(loaded, probe()), probe_logits(model, probe()))


def spoil(file: Path) -> None:
    tensors = load_file(file)
    name = next(name for name in tensors if "layers.1.mlp.down_proj" in name)
    tensors[name] = torch.zeros_like(tensors[name])
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("adapter", "function", "file"),
    [
        (FullConfig(), "write_model", "model.safetensors"),
        (LoraConfig(), "save_adapter", "adapter_model.safetensors"),
    ],
)
def test_files_that_do_not_read_back_are_a_training_fault(
    adapter: AdapterConfig,
    function: str,
    file: str,
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = move(built(base, adapter=adapter))
    write = getattr(saving, function)

    def write_badly(model: Any, folder: Path, *rest: Any) -> None:
        write(model, folder, *rest)
        spoil(folder / file)

    monkeypatch.setattr(saving, function, write_badly)
    with pytest.raises(TrainingFault, match=r"failed verification: .*logits differ"):
        save(model, adapter, base, tmp_path)
