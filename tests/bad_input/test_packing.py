"""Bases whose documents depend on their batch are refused before any weight is read; no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.in_process import accepted, make_data, make_model, run_command

SEES_PADDING = "let documents see the padding after them"
ANOTHER_BASE = "model.path=ANOTHER_BASE"
UNBATCHED: list[tuple[dict[str, Any], str, str]] = [
    ({"model_type": "encoder-decoder"}, SEES_PADDING, ANOTHER_BASE),
    ({"model_type": "nllb-moe"}, "drop tokens beyond an expert_capacity", ANOTHER_BASE),
    (
        {"model_type": "t5gemma", "decoder_start_token_id": 0, "decoder": {"pad_token_id": 0}},
        "this decoder starts with one (decoder_start_token_id)",
        ANOTHER_BASE,
    ),
    ({"model_type": "axk2", "index_topk": 64}, "the 64 keys", "data.sequence_len=64"),
]


@pytest.mark.parametrize(("numbers", "said", "instead"), UNBATCHED)
def test_a_base_whose_documents_depend_on_their_batch(
    numbers: dict[str, Any], said: str, instead: str, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", **numbers)
    data = f"data.datasets=[{{path: {make_data(tmp_path / 'data.jsonl')}}}]"
    typed = [f"model.path={model}", data, "adapter=full"]
    for verb, packing in (("train", "none"), ("train", "multipack"), ("preview", "multipack")):
        result = run_command(*typed, "data.sequence_len=100", f"packing={packing}", verb=verb)
        assert result.code == 2
        assert said in result.stderr and f"type {instead}" in result.stderr
    if instead.startswith("data."):
        assert said not in run_command(*typed, instead).stderr


@pytest.mark.parametrize(
    "numbers",
    [
        {"model_type": "t5", "is_encoder_decoder": True},
        {"model_type": "falcon", "alibi": True},
        {"model_type": "mamba2"},
        {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]},
        {"model_type": "gemma3", "text_config": {"layer_types": ["sliding_attention"]}},
    ],
)
def test_a_base_that_goes_on(numbers: dict[str, Any], tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", **numbers)
    data = make_data(tmp_path / "data.jsonl")
    accepted(f"model.path={model}", f"data.datasets=[{{path: {data}}}]", "adapter=full")
