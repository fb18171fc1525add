"""A model's repeated layers are found in forward order, and a setting means what it says."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from app.model.adapter import LoraConfig, apply_adapter
from app.model.layers import decoder_layers, layer_numbers
from tests.families import on_meta
from tests.tiny import tiny_bart, tiny_gpt2, tiny_llama, tiny_t5


@pytest.mark.parametrize(
    ("kind", "prefix"),
    [
        ("llama", "model.layers"),
        ("gemma3_text", "model.layers"),
        ("phi", "model.layers"),
        ("phi3", "model.layers"),
        ("gpt2", "transformer.h"),
        ("falcon", "transformer.h"),
    ],
)
def test_the_layers_of_causal_models(kind: str, prefix: str) -> None:
    assert decoder_layers(on_meta(kind, num_hidden_layers=3)) == [
        f"{prefix}.{number}" for number in range(3)
    ]


def test_encoder_layers_come_before_decoder_layers() -> None:
    t5 = decoder_layers(tiny_t5(num_decoder_layers=3))
    assert t5 == [
        *("encoder.block.0", "encoder.block.1"),
        *("decoder.block.0", "decoder.block.1", "decoder.block.2"),
    ]
    bart = decoder_layers(tiny_bart())
    assert bart == [f"model.{side}.layers.{n}" for side in ("encoder", "decoder") for n in (0, 1)]


def test_layers_are_found_below_an_adapter() -> None:
    adapted = apply_adapter(tiny_gpt2(), LoraConfig(r=2), half_precision=False)
    names = decoder_layers(adapted)
    assert names == [f"base_model.model.transformer.h.{number}" for number in range(2)]
    assert [type(adapted.get_submodule(name)).__name__ for name in names] == ["GPT2Block"] * 2


def test_a_model_without_a_declared_layer_class_is_refused() -> None:
    model = tiny_llama()
    model._no_split_modules = None
    with pytest.raises(
        ValueError, match=r"do not declare the class of their layers; type adapter\.layers=all"
    ):
        decoder_layers(model)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("all", [0, 1, 2, 3]),
        ("top 1", [3]),
        ("top 4", [0, 1, 2, 3]),
        (" top  2 ", [2, 3]),
        ([2, 0, 2], [0, 2]),
    ],
)
def test_layers_selected_out_of_four(setting: Any, expected: list[int]) -> None:
    assert list(layer_numbers(setting, 4)) == expected


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("top 40", r"'top 40', but the model has 32 layers; type a number from 1 to 32"),
        ("top 0", r"'top 0', but the model has 32 layers"),
        (8, r"'adapter\.layers=top 8' or adapter\.layers=\[8\]"),
        ([31, 32], "has no layer 32; its 32 layers are numbered 0 to 31"),
        ([-1], "has no layer -1"),
        ([], r"=\[\] is not valid; type all"),
        ([True], "is not valid"),
        ("last 8", "'last 8' is not valid; type all, 'adapter.layers=top 8'"),
        ("none", "'none' is not valid"),
        (None, "None is not valid"),
    ],
)
def test_an_invalid_selection_is_refused(setting: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer_numbers(setting, 32)


def test_layer_numbers_needs_no_torch() -> None:
    code = (
        "import sys; from app.model.layers import layer_numbers; "
        "assert list(layer_numbers('top 2', 3)) == [1, 2]; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
