"""IA3 scales keys, values and the inner feed-forward, by the names of every architecture."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from app.model.adapter.apply import apply_adapter
from app.model.adapter.saved import load_adapter, probe_logits, save_adapter
from app.model.adapter.settings import Ia3Config
from app.model.adapter.targets import find_targets
from app.model.base import ModelConfig, load_base
from app.model.description import describe_model
from app.model.quantization import QuantizationConfig
from tests.families import on_meta
from tests.tiny import TINY, move, probe_of, tiny_gpt2, tiny_llama

BF16, FP32 = torch.bfloat16, torch.float32


def adapt(model: Any, *, half: bool = False, token_ids: Any = (), **settings: Any) -> Any:
    config = Ia3Config(**settings)
    return apply_adapter(model, config, half_precision=half, token_ids=token_ids)


def vectors(model: Any) -> dict[str, torch.nn.Parameter]:
    return {
        name.removeprefix("base_model.model.").split(".ia3_l")[0]: parameter
        for name, parameter in model.named_parameters()
        if ".ia3_l." in name
    }


@pytest.mark.parametrize(
    ("kind", "outputs", "inside"),
    [
        ("llama", {"k_proj", "v_proj"}, {"down_proj"}),
        ("phi", {"k_proj", "v_proj"}, {"fc2"}),
        ("phi3", {"qkv_proj"}, {"down_proj"}),
        ("gpt2", {"c_attn"}, {"c_proj"}),
        ("falcon", {"query_key_value"}, {"dense_4h_to_h"}),
        ("t5", {"k", "v"}, {"wo"}),
        ("bart", {"k_proj", "v_proj"}, {"fc2"}),
    ],
)
def test_targets_by_architecture(kind: str, outputs: set[str], inside: set[str]) -> None:
    model = on_meta(kind)
    found = find_targets(Ia3Config(), describe_model(model))
    chosen, inner = found.matrices, found.scaled_inputs
    assert {name.rpartition(".")[2] for name in inner} == inside
    assert {name.rpartition(".")[2] for name in set(chosen) - set(inner)} == outputs
    assert len(inner) == (4 if model.config.is_encoder_decoder else 2)
    if kind == "gpt2":
        assert all(name.endswith("mlp.c_proj") for name in inner)
    if kind in ("t5", "bart"):  # self-attention twice and cross-attention once
        assert len(chosen) - len(inner) == 2 * (2 + 2 * 2)
        assert any("EncDec" in name or "encoder_attn" in name for name in chosen)


@pytest.mark.parametrize("kind", TINY)
def test_only_vectors_other_than_ones_change_logits(kind: str) -> None:
    base = TINY[kind]()
    row = probe_of(base)
    plain = probe_logits(copy.deepcopy(base), row)
    model = adapt(base)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == len(vectors(model))
    assert all(bool((vector == 1).all()) for vector in vectors(model).values())
    assert torch.equal(probe_logits(model, row), plain)
    move(model, scale=0.3)
    moved = probe_logits(model, row)
    assert not torch.allclose(moved, plain, atol=1e-2)
    merged = model.merge_and_unload().eval()
    assert torch.allclose(probe_logits(merged, row), moved, atol=1e-5)


@pytest.mark.parametrize("kind", TINY)
def test_saved_vectors_are_loaded_onto_the_same_modules(kind: str, tmp_path: Path) -> None:
    model = move(adapt(TINY[kind](), layers="top 1"), scale=0.3)
    save_adapter(model, tmp_path)
    row = probe_of(model)
    by_peft = peft.PeftModel.from_pretrained(TINY[kind](), str(tmp_path)).eval()
    for read in (load_adapter(TINY[kind](), tmp_path), by_peft):
        assert vectors(read).keys() == vectors(model).keys()
        assert torch.equal(probe_logits(read, row), probe_logits(model, row))


def test_typed_targets_are_used_and_feed_forward_is_found_among_them() -> None:
    model = adapt(tiny_llama(), target_modules=["q_proj", "down_proj"])
    shapes = {name.rpartition(".")[2]: tuple(p.shape) for name, p in vectors(model).items()}
    assert shapes == {"q_proj": (32, 1), "down_proj": (1, 48)}
    model = adapt(tiny_llama(), target_modules=["k_proj", "down_proj"], feedforward_modules=[])
    shapes = {name.rpartition(".")[2]: tuple(p.shape) for name, p in vectors(model).items()}
    assert shapes == {"k_proj": (16, 1), "down_proj": (32, 1)}
    model = adapt(tiny_gpt2(), target_modules=["c_proj"], feedforward_modules=["mlp.c_proj"])
    shapes = {name.rpartition(".h.1.")[2]: tuple(p.shape) for name, p in vectors(model).items()}
    assert shapes["mlp.c_proj"] == (1, 48)
    assert shapes["attn.c_proj"] == (32, 1)


@pytest.mark.parametrize(
    ("kind", "method", "dtype", "half"),
    [("llama", "nf4", FP32, False), ("t5", "nf4", BF16, True), ("bart", "int8", BF16, False)],
)
def test_outputs_on_a_quantized_base_keep_its_dtype(
    kind: str, method: str, dtype: torch.dtype, half: bool, tmp_path: Path
) -> None:
    TINY[kind]().save_pretrained(tmp_path / "base")
    settings = QuantizationConfig(method=method)
    base = load_base(ModelConfig(path=str(tmp_path / "base")), "sdpa", dtype, settings)
    model = adapt(base, half=half)
    assert {vector.dtype for vector in vectors(model).values()} == {BF16 if half else FP32}
    row = probe_of(base)
    with torch.autocast("cpu", BF16, enabled=dtype == BF16 and not half):
        started = probe_logits(model, row)
        with model.disable_adapter():
            assert torch.equal(probe_logits(model, row), started)
        model.train()(**row).logits.float().square().sum().backward()
    assert all(v.grad is not None and v.grad.any() for v in vectors(model).values())
