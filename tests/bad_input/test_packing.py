"""Bases that cannot be packed are refused before any weight is read, with what to type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.door import ask, make_data, make_model

REFUSED: list[tuple[dict[str, Any], list[str], str]] = [
    ({"model_type": "bart", "is_encoder_decoder": True}, [], "bart models compute positions from"),
    ({"model_type": "pegasus", "is_encoder_decoder": True}, [], "pegasus models compute positions"),
    ({"model_type": "roberta"}, [], "roberta models compute positions"),
    ({"model_type": "bloom"}, [], "bloom models compute their ALiBi bias"),
    ({"model_type": "openai-gpt"}, [], "openai-gpt models take no mask"),
    *(
        ({"model_type": model_type}, [], f"{model_type} models have recurrent layers")
        for model_type in ("bamba", "falcon_mamba", "mamba", "mamba2", "qwen3_next", "nemotron_h")
    ),
    (
        {"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"]},
        [],
        "granitemoehybrid models have recurrent layers",
    ),
    (
        {"model_type": "new", "text_config": {"layer_types": ["linear_attention"]}},
        [],
        "new models have recurrent layers",
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
    answer = ask(*typed)
    assert answer.code == 2
    assert said in answer.said and "packing=none" in answer.said
    unpacked = [word for word in typed if not word.startswith("packing=")]
    assert ask(*unpacked, "packing=none").code == 0


SEES_PADDING = "let documents see the padding after them"
ANOTHER_BASE = "model.path=ANOTHER_BASE"
UNBATCHED: list[tuple[dict[str, Any], str, str]] = [
    ({"model_type": "encoder-decoder"}, SEES_PADDING, ANOTHER_BASE),
    ({"model_type": "prophetnet"}, SEES_PADDING, ANOTHER_BASE),
    ({"model_type": "nllb-moe"}, "drop tokens beyond an expert_capacity", ANOTHER_BASE),
    (
        {"model_type": "t5gemma", "decoder_start_token_id": 0, "decoder": {"pad_token_id": 0}},
        "this decoder starts with one (decoder_start_token_id)",
        ANOTHER_BASE,
    ),
    ({"model_type": "axk2", "index_topk": 64}, "the 64 keys", "data.sequence_len=64"),
    ({"model_type": "doge", "keep_window_size": 64}, "the 64 keys", "data.sequence_len=64"),
    ({"model_type": "deepseek_v4", "index_topk": 16}, "the 16 keys", "data.sequence_len=64"),
]


@pytest.mark.parametrize(("numbers", "said", "instead"), UNBATCHED)
def test_a_base_whose_documents_depend_on_their_batch(
    numbers: dict[str, Any], said: str, instead: str, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", **numbers)
    data = f"data.datasets=[{{path: {make_data(tmp_path / 'data.jsonl')}}}]"
    typed = [f"model.path={model}", data, "adapter=full"]
    for verb, packing in (("train", "none"), ("train", "multipack"), ("preview", "multipack")):
        answer = ask(*typed, "data.sequence_len=100", f"packing={packing}", verb=verb)
        assert answer.code == 2
        assert said in answer.said and f"type {instead}" in answer.said
    if instead.startswith("data."):
        assert said not in ask(*typed, instead).said


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
