"""Every family of the installed transformers has the result that docs/models.md lists.

A family that is not in the table, as of a newer transformers, must not differ or crash.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.families import tiny_family
from tests.parity.every_family import outcome, read_table, registry, save_tiny
from tests.parity.first_step import check_equal, our_step, plain_step

FAST = [
    *("bloom", "cohere2", "deepseek_v3", "falcon_h1", "gemma2", "gemma3_text", "gpt2", "gpt_oss"),
    *("granite", "granitemoehybrid", "jamba", "lfm2", "llama", "mamba2", "minimax", "mixtral"),
    *("nemotron_h", "olmo3", "phi3", "qwen2", "qwen3", "qwen3_5_text", "qwen3_next", "roberta"),
    "t5",
]
"""25 families that the fast tests use"""


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.parametrize("family", registry())
def test_a_family(family: str, tmp_path: Path) -> None:
    found = outcome(family, tmp_path)
    expected = read_table().get(family)
    if expected is None or expected.startswith("not tried") or found.startswith("not tried"):
        pytest.skip(found)
    if "is not installed" in expected and found != expected:
        pytest.skip(f"the package is installed: {found}")
    assert found == expected


@pytest.mark.parametrize("family", FAST)
def test_the_first_step_of_a_family(family: str, tmp_path: Path) -> None:
    save_tiny(family, tmp_path)
    check_equal(our_step(tmp_path), plain_step(tmp_path))


PADDED = [
    *("bert", "gemma2", "gpt2", "mixtral", "jamba", "lfm2", "mamba2", "qwen3_5_text"),
    *("openai-gpt", "trocr"),  # never packed
]


@pytest.mark.parametrize("family", PADDED)
def test_padded_rows_of_a_family(family: str, tmp_path: Path) -> None:
    save_tiny(family, tmp_path)
    check_equal(our_step(tmp_path, packing="none"), plain_step(tmp_path))


def test_a_model_that_attends_to_later_tokens_is_refused(tmp_path: Path) -> None:
    tiny_family("bert", is_decoder=False).save_pretrained(tmp_path)
    refused = 'bert models attend to later tokens.* with "is_decoder": true in config.json'
    with pytest.raises(ValueError, match=refused):
        our_step(tmp_path, "none")


def test_the_daily_families_are_registered_and_in_the_table() -> None:
    assert len(FAST) == 25 and set(FAST) <= set(registry())
    table = read_table()
    assert all(table[family].startswith("equal") for family in FAST)
    assert not [row for row in table.values() if row.startswith(("DIFFERENT", "CRASHED"))]
