"""Bases that cannot be packed are refused before any weight is read, with what to type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.door import ask, make_data, make_model

REFUSED: list[tuple[dict[str, Any], list[str], str]] = [
    ({"model_type": "bart", "is_encoder_decoder": True}, [], "bart models number the tokens"),
    ({"model_type": "pegasus", "is_encoder_decoder": True}, [], "pegasus models number"),
    ({"model_type": "roberta"}, [], "roberta models number the tokens"),
    ({"model_type": "bloom"}, [], "bloom models with ALiBi"),
    ({"model_type": "openai-gpt"}, [], "openai-gpt models take no mask"),
    *(
        ({"model_type": model_type}, [], f"{model_type} models have layers that hand a state on")
        for model_type in ("bamba", "falcon_mamba", "mamba", "mamba2", "qwen3_next", "nemotron_h")
    ),
    (
        {"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"]},
        [],
        "granitemoehybrid models have layers that hand a state on",
    ),
    (
        {"model_type": "new", "text_config": {"layer_types": ["linear_attention"]}},
        [],
        "new models have layers that hand a state on",
    ),
    (
        {"model_type": "falcon", "alibi": True},
        ["packing=like_length"],
        "packing=like_length: falcon",
    ),
    (
        {"model_type": "t5", "is_encoder_decoder": True},
        ["attention=eager"],
        "attention=eager cannot keep",
    ),
]


@pytest.mark.parametrize(("numbers", "words", "said"), REFUSED)
def test_a_base_that_cannot_be_packed(
    numbers: dict[str, Any], words: list[str], said: str, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", **numbers)
    typed = [
        f"model.path={model}",
        f"data.datasets=[{{path: {make_data(tmp_path / 'data.jsonl')}}}]",
        "adapter=full",
        *words,
    ]
    for verb in ("train", "preview"):
        answer = ask(*typed, verb=verb)
        assert answer.code == 2
        assert said in answer.said and "packing=none" in answer.said
    unpacked = [word for word in typed if not word.startswith("packing=")]
    assert ask(*unpacked, "packing=none").code == 0


@pytest.mark.parametrize("packing", ["none", "multipack"])
@pytest.mark.parametrize("model_type", ["encoder-decoder", "prophetnet"])
def test_a_base_that_is_right_in_no_layout_is_refused_at_once(
    model_type: str, packing: str, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", model_type=model_type, is_encoder_decoder=True)
    data = f"data.datasets=[{{path: {make_data(tmp_path / 'data.jsonl')}}}]"
    answer = ask(f"model.path={model}", data, "adapter=full", f"packing={packing}")
    assert answer.code == 2
    assert "let documents see the padding behind them" in answer.said
    assert "type model.path=ANOTHER_BASE" in answer.said


@pytest.mark.parametrize(
    "numbers",
    [
        {"model_type": "t5", "is_encoder_decoder": True},
        {"model_type": "falcon", "alibi": False},
        {"model_type": "gpt2"},
        {"model_type": "granitemoehybrid", "layer_types": ["attention", "attention"]},
        {"model_type": "gemma3", "text_config": {"layer_types": ["sliding_attention"]}},
    ],
)
def test_a_base_that_can_be_packed(numbers: dict[str, Any], tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", **numbers)
    data = make_data(tmp_path / "data.jsonl")
    answer = ask(f"model.path={model}", f"data.datasets=[{{path: {data}}}]", "adapter=full")
    assert answer.code == 0, answer.said
