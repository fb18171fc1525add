"""A tokenizer for training ends answers and can fill unused positions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from app.model.build import ModelConfig
from app.model.tokenizer import build_tokenizer
from tests.tiny import TINY_BASE


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY_BASE / name, tmp_path / name)
    return tmp_path


def without(folder: Path, *keys: str) -> ModelConfig:
    """The folder's model after taking tokens out of its tokenizer_config.json."""
    file = folder / "tokenizer_config.json"
    kept = {key: value for key, value in json.loads(file.read_text()).items() if key not in keys}
    file.write_text(json.dumps(kept))
    return ModelConfig(path=str(folder))


def test_a_whole_tokenizer_is_left_as_it_is(folder: Path) -> None:
    tokenizer = build_tokenizer(ModelConfig(path=str(folder)))
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|pad|>"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert "<|im_start|>" in tokenizer.chat_template


def test_without_an_eos_token_no_answer_could_end(folder: Path) -> None:
    config = without(folder, "eos_token")
    with pytest.raises(ValueError, match="has no eos_token") as error:
        build_tokenizer(config)
    assert "tokenizer_config.json" in str(error.value)
    assert str(folder) in str(error.value)


def test_without_a_pad_token_the_eos_token_fills(folder: Path) -> None:
    tokenizer = build_tokenizer(without(folder, "pad_token"))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id is not None


def test_another_tokenizer_can_be_named(folder: Path, tmp_path: Path) -> None:
    empty = tmp_path / "weights"
    empty.mkdir()
    config = ModelConfig(path=str(empty), tokenizer_path=str(folder))
    assert build_tokenizer(config).eos_token == "<|im_end|>"
