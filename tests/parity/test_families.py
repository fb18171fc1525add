"""Models equal plain transformers, packed if possible and otherwise in padded rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.families import tiny_family
from tests.parity.first_step import check_equal, our_step, plain_step
from tests.parity.test_every_family import FAST

EQUAL = ["bert", "diffllama", "gemma2", "gpt2", "mixtral", "nemotron", "qwen3", "stablelm"]
RECURRENT = [
    *("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "lfm2", "mamba", "mamba2"),
    *("nemotron_h", "qwen3_5_text", "qwen3_next"),
]
UNPACKED = ["bloom", "openai-gpt", "roberta", "trocr"]
"""families that use padded rows"""


def cases(*families: str) -> list[Any]:
    """Return the families, marked slow if test_every_family tests the same step."""
    return [
        pytest.param(family, marks=pytest.mark.slow if family in FAST else ())
        for family in families
    ]


@pytest.fixture
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return the folder of a random base of the parametrized family."""
    tiny_family(request.param).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("saved", [*EQUAL, *RECURRENT, *UNPACKED], indirect=True)
def test_padded_rows_equal_plain_transformers(saved: Path) -> None:
    check_equal(our_step(saved, packing="none"), plain_step(saved))


@pytest.mark.parametrize("saved", cases(*EQUAL, *RECURRENT), indirect=True)
def test_packs_equal_plain_transformers(saved: Path) -> None:
    check_equal(our_step(saved), plain_step(saved))


@pytest.mark.parametrize("saved", cases(*UNPACKED), indirect=True)
def test_a_model_that_cannot_be_packed_uses_padded_rows(saved: Path) -> None:
    check_equal(our_step(saved), plain_step(saved))


@pytest.mark.parametrize("packing", ["none", "multipack"])
@pytest.mark.parametrize("family", ["bert", "electra"])
def test_a_model_that_attends_to_later_tokens_is_refused(
    family: str, packing: str, tmp_path: Path
) -> None:
    tiny_family(family, is_decoder=False).save_pretrained(tmp_path)
    refused = f'{family} models attend to later tokens.* with "is_decoder": true in config.json'
    with pytest.raises(ValueError, match=refused):
        our_step(tmp_path, packing)
