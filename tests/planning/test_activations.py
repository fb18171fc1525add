"""What a layer keeps for its backward pass, by arithmetic and as autograd keeps it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    T5Config,
)

from app.config import load_config
from app.model.adapter import LoraConfig, apply_adapter
from app.planning.activations import LayerExecution, layer_bytes
from app.planning.planned_model import Widths, config_getter, widths_of
from tests.tiny import random_ids, tiny_llama

LLAMA_8B = Widths(
    layers=32,
    hidden=4096,
    query=4096,
    key_value=1024,
    feed_forward=14336,
    heads=32,
    vocabulary=128256,
)
FUSED = LayerExecution(tokens=8192, fuses_norm_and_gate=True)


def kept_a_layer(**how: Any) -> float:
    """Bytes a token that one more layer keeps, as autograd tells."""
    sizes = []
    for layers in (1, 2):
        model = tiny_llama(
            num_hidden_layers=layers,
            hidden_size=256,
            intermediate_size=640,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=512,
        )
        model.to(torch.bfloat16)
        adapted = apply_adapter(model, LoraConfig(r=1, **how), half_precision=False).train()
        own = {weight.untyped_storage().data_ptr() for weight in adapted.parameters()}
        kept: dict[int, Tensor] = {}

        def keep(tensor: Tensor, kept: dict[int, Tensor] = kept) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        ids = random_ids(1, 512)
        saved = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with torch.autocast("cpu", torch.bfloat16), saved:
            adapted.base_model.model.model(input_ids=ids, use_cache=False)
        found = (kept[place].untyped_storage().nbytes() for place in kept.keys() - own)
        sizes.append(sum(found) / ids.numel())
    return sizes[1] - sizes[0]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_arithmetic_is_what_autograd_keeps(dropout: float) -> None:
    widths = Widths(
        layers=2, hidden=256, query=256, key_value=256, feed_forward=640, heads=4, vocabulary=64
    )
    expected = layer_bytes(widths, LayerExecution(tokens=512, drops_inputs=dropout > 0), "none")
    if dropout:  # a CPU's masks are as wide as the numbers, a GPU's take a byte
        expected += widths.inputs
    assert kept_a_layer(dropout=dropout) == pytest.approx(expected, rel=0.05)


def test_eight_billion_parameters_and_8192_tokens() -> None:
    """As a step of Llama 3.1 8B was traced, its LoRA of rank 16 left out."""
    of_layer = layer_bytes(LLAMA_8B, FUSED, "none") * FUSED.tokens
    assert 32 * of_layer / 2**30 == pytest.approx(34.0, rel=0.01)
    plain = replace(FUSED, fuses_norm_and_gate=False)
    assert layer_bytes(LLAMA_8B, plain, "none") == pytest.approx(185_000, rel=0.01)
    full = replace(plain, trains_base=True)
    assert layer_bytes(LLAMA_8B, full, "none") == pytest.approx(200_840, rel=0.01)
    repeated = layer_bytes(LLAMA_8B, replace(FUSED, repeats_heads=True), "none") * FUSED.tokens
    assert 32 * (repeated - of_layer) == 3 * 2**30


def test_widths_are_read_from_configs() -> None:
    for config, expected in (
        (LlamaConfig(num_key_value_heads=8), (32, 4096, 4096, 1024, 11008)),
        (GPT2Config(), (12, 768, 768, 768, 3072)),
        (T5Config(), (12, 512, 512, 512, 2048)),
        (MixtralConfig(), (32, 4096, 4096, 1024, 2 * 14336)),
    ):
        found = widths_of(config_getter(config))
        assert found is not None
        numbers = found.layers, found.hidden, found.query, found.key_value, found.feed_forward
        assert numbers == expected
    assert widths_of(config_getter(PretrainedConfig())) is None


def test_layers_with_numbers_of_their_own_count_by_their_mean() -> None:
    config = load_config("train", ["model=gemma4_12b", "data=dolly"])
    numbers = dict(config.model.architecture)
    widths = widths_of(config_getter(AutoConfig.for_model(numbers.pop("model_type"), **numbers)))
    assert widths is not None
    # Heads of 256 in five layers of six, which attend nearby, and of 512 in the sixth.
    assert 16 * 256 < widths.query < 16 * 512
    assert widths.feed_forward == numbers["intermediate_size"]
