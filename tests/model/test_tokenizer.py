"""A tokenizer for training ends answers and can fill unused positions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from app.model.base import ModelConfig
from app.model.tokenizer import build_tokenizer
from tests.tiny import TINY_BASE

SHARED = Path(__file__).parents[2] / ".." / "shared" / "data" / "tokenizers"


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


def test_a_tokenizer_without_an_eos_token_is_refused(folder: Path) -> None:
    config = without(folder, "eos_token")
    with pytest.raises(ValueError, match="has no eos_token") as error:
        build_tokenizer(config)
    assert "tokenizer_config.json" in str(error.value)
    assert str(folder) in str(error.value)


def test_without_a_pad_token_eos_is_used(folder: Path) -> None:
    tokenizer = build_tokenizer(without(folder, "pad_token"))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id is not None


def test_another_tokenizer_can_be_named(folder: Path, tmp_path: Path) -> None:
    empty = tmp_path / "weights"
    empty.mkdir()
    config = ModelConfig(path=str(empty), tokenizer_path=str(folder))
    assert build_tokenizer(config).eos_token == "<|im_end|>"


def shared(name: str) -> Path:
    if not (SHARED / name).is_dir():
        pytest.skip("needs the shared tokenizers")
    return SHARED / name


def test_the_fix_for_a_missing_tokenizer_config(tmp_path: Path) -> None:
    shutil.copy(shared("olmo-gpt-neox") / "tokenizer.json", tmp_path)
    with pytest.raises(ValueError, match="has no eos_token") as error:
        build_tokenizer(ModelConfig(path=str(tmp_path)))
    written = '{"eos_token": "<|endoftext|>"}'
    assert str(error.value).endswith(
        f"write a tokenizer_config.json with {written} into that folder"
    )
    (tmp_path / "tokenizer_config.json").write_text(written)
    assert build_tokenizer(ModelConfig(path=str(tmp_path))).eos_token == "<|endoftext|>"


def test_a_sentencepiece_file_of_t5_is_loaded() -> None:
    import sentencepiece

    folder = shared("t5")
    tokenizer = build_tokenizer(ModelConfig(path="none", tokenizer_path=str(folder)))
    own = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spiece.model"))
    text = "Translate to German:  \u00e9t\u00e9 \u2603 is  good."
    assert tokenizer.is_fast and len(tokenizer) == 32100
    assert tokenizer(text)["input_ids"] == [*own.encode(text), tokenizer.eos_token_id]


def test_a_sentencepiece_file_of_unknown_kind_is_refused() -> None:
    folder = shared("mistral-7b-v0.1")
    with pytest.raises(ValueError, match=r"tokenizer.model alone does not determine") as error:
        build_tokenizer(ModelConfig(path=str(folder)))
    assert "set model.tokenizer_path to a folder with tokenizer.json" in str(error.value)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    shutil.copy(TINY_BASE / "config.json", tmp_path)
    with pytest.raises(ValueError, match=r"it has no tokenizer.json") as error:
        build_tokenizer(ModelConfig(path=str(tmp_path)))
    assert "\n" not in str(error.value) and "from one of" not in str(error.value)
