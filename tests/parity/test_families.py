"""Models equal plain transformers, packed if possible and otherwise in padded rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.families import tiny_family
from tests.parity.first_step import check_equal, our_step, plain_step

PADDED = [
    *("bert", "diffllama", "gemma2", "gpt2", "mixtral", "nemotron", "stablelm"),
    *("bamba", "falcon_h1", "falcon_mamba", "jamba", "lfm2", "mamba2", "qwen3_5_text"),
]
"""families that are packed unless packing=none is typed, also recurrent ones"""
PACKED = ["bert", "diffllama", "nemotron", "stablelm", "bamba", "falcon_mamba", "mamba"]
UNPACKED = ["openai-gpt", "trocr"]
"""families that use padded rows"""


@pytest.fixture
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return the folder of a random base of the parametrized family."""
    tiny_family(request.param).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("saved", [*PADDED, *UNPACKED], indirect=True)
def test_padded_rows_equal_plain_transformers(saved: Path) -> None:
    check_equal(our_step(saved, packing="none"), plain_step(saved))


@pytest.mark.parametrize("saved", [*PACKED, *UNPACKED], indirect=True)
def test_the_default_packing_equals_plain_transformers(saved: Path) -> None:
    """`test_every_family` has those of daily use."""
    check_equal(our_step(saved), plain_step(saved))


@pytest.mark.parametrize(("family", "packing"), [("bert", "none"), ("electra", "multipack")])
def test_a_model_that_attends_to_later_tokens_is_refused(
    family: str, packing: str, tmp_path: Path
) -> None:
    tiny_family(family, is_decoder=False).save_pretrained(tmp_path)
    refused = f'{family} models attend to later tokens.* with "is_decoder": true in config.json'
    with pytest.raises(ValueError, match=refused):
        our_step(tmp_path, packing)
