"""Adapters on the top layers only: the backward pass ends at the lowest of them."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from app.model.adapter import (
    AdapterConfig,
    FreezeConfig,
    Ia3Config,
    LoraConfig,
    apply_adapter,
)
from app.model.base import ModelConfig, load_base
from app.model.layers import decoder_layers
from app.model.quantization import QuantizationConfig
from app.model.recompute import RecomputeConfig, apply_recompute
from tests.tiny import probe_of, tiny_llama, tiny_t5

pytestmark = pytest.mark.slow

NUM_LAYERS = 4
CONFIGS = {
    "lora": lambda layers: LoraConfig(r=4, layers=layers),
    "dora": lambda layers: LoraConfig(r=4, layers=layers, use_dora=True),
    "ia3": lambda layers: Ia3Config(layers=layers),
    "freeze": lambda layers: FreezeConfig(layers=layers),
}


class SavedTensor:
    """A tensor that autograd saves for the backward pass, and the layer that saves it."""

    def __init__(self, tensor: torch.Tensor, layer: int) -> None:
        self.tensor, self.layer = tensor, layer


class SavedBytes:
    """Counts the bytes that each layer saves for the backward pass, without weights."""

    def __init__(self, model: Any) -> None:
        self.layer = -1
        self.enters: dict[int, bool] = {}
        self.saved: weakref.WeakSet[SavedTensor] = weakref.WeakSet()
        self.weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        for number, name in enumerate(decoder_layers(model)):
            module = model.get_submodule(name)
            module.register_forward_pre_hook(self.entering(number), with_kwargs=True)
            module.register_forward_hook(self.leaving)

    def entering(self, number: int) -> Any:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            self.layer, self.enters[number] = number, hidden.requires_grad

        return hook

    def leaving(self, *_: Any) -> None:
        self.layer = -1

    def pack(self, tensor: torch.Tensor) -> SavedTensor:
        saved = SavedTensor(tensor, self.layer)
        self.saved.add(saved)
        return saved

    def bytes_by_layer(self) -> Counter[int]:
        gc.collect()
        seen, found = set(), Counter[int]()
        for saved in self.saved:
            storage = saved.tensor.untyped_storage()
            if storage.data_ptr() not in self.weights | seen:
                seen.add(storage.data_ptr())
                found[saved.layer] += storage.nbytes()
        return found


def forward(model: Any) -> tuple[SavedBytes, torch.Tensor]:
    """Return what a forward pass saves, and its loss."""
    watch = SavedBytes(model)
    with torch.autograd.graph.saved_tensors_hooks(watch.pack, lambda saved: saved.tensor):
        return watch, model(**probe_of(model)).logits.square().mean()


def build(
    tmp_path: Path, config: AdapterConfig, recompute: str = "none", quantization: str = "none"
) -> Any:
    tiny_llama(num_hidden_layers=NUM_LAYERS).save_pretrained(tmp_path)
    settings = QuantizationConfig(method=quantization)
    base = load_base(ModelConfig(path=str(tmp_path)), "eager", torch.float32, settings)
    apply_recompute(base, RecomputeConfig(mode=recompute))
    return apply_adapter(base, config, half_precision=False).train()


@pytest.mark.parametrize(
    ("kind", "quantization", "recompute"),
    [
        ("lora", "none", "none"),
        ("dora", "nf4", "full"),
        ("ia3", "none", "full"),
        ("freeze", "none", "none"),
        ("lora", "int8", "none"),
    ],
)
def test_nothing_is_saved_or_computed_below_the_lowest_adapter(
    kind: str, quantization: str, recompute: str, tmp_path: Path
) -> None:
    model = build(tmp_path, CONFIGS[kind]("top 1"), recompute, quantization)
    watch, loss = forward(model)
    assert watch.enters == dict.fromkeys(range(NUM_LAYERS), False)
    saved = watch.bytes_by_layer()
    assert [saved[layer] for layer in range(NUM_LAYERS - 1)] == [0] * (NUM_LAYERS - 1)
    assert saved[-1] > 0
    # Recompute saves only a layer's input, which may have been counted for the layer below.
    assert recompute == "full" or saved[NUM_LAYERS - 1] > 0
    loss.backward()
    trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all(gradient is not None for gradient in trained.values())
    assert all(f"layers.{NUM_LAYERS - 1}." in name for name in trained)


@pytest.mark.parametrize(("lowest", "recompute"), [(0, "full"), (2, "none")])
def test_gradients_reach_the_lowest_adapter(lowest: int, recompute: str, tmp_path: Path) -> None:
    model = build(tmp_path, CONFIGS["lora"]([lowest]), recompute)
    watch, loss = forward(model)
    assert watch.enters == {layer: layer > lowest for layer in range(NUM_LAYERS)}
    loss.backward()
    b = [p.grad for name, p in model.named_parameters() if "lora_B" in name]
    assert all(gradient is not None and gradient.any() for gradient in b)


def test_an_adapter_on_the_decoder_needs_no_encoder_backward() -> None:
    base = tiny_t5()
    model = apply_adapter(base, LoraConfig(r=4, layers="top 1"), half_precision=False).train()
    watch, loss = forward(model)
    assert watch.enters == dict.fromkeys(range(4), False)
    saved = watch.bytes_by_layer()
    assert [saved[layer] for layer in range(3)] == [0, 0, 0]
    assert saved[3] > 0
    loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
