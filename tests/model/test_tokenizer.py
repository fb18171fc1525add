"""A tokenizer for training ends answers, fills unused positions, and has a chat template."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from app.assembly.base import open_tuned
from app.config import load_config
from app.model.base import ModelConfig
from app.model.tokenizer import (
    add_stop_tokens,
    build_tokenizer,
    save_stop_tokens,
    saved_stop_ids,
    stop_token_ids,
    with_chat_template,
)
from app.training.trainer import resolve_single_device
from common.errors import UserError
from data_modules import DataConfig
from data_modules.template.named_templates import named_template
from tests.tiny import TINY_BASE, train_into

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


@pytest.fixture
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY_BASE)


@pytest.fixture
def plain_base(tmp_path: Path) -> Path:
    """The tiny base, whose tokenizer has no chat template."""
    folder = shutil.copytree(TINY_BASE, tmp_path / "base")
    (folder / "chat_template.jinja").unlink()
    return folder


@pytest.mark.parametrize(
    ("typed", "own", "of_model", "used"),
    [
        ("vicuna", True, "alpaca", "vicuna"),
        ("vicuna", False, "alpaca", "vicuna"),
        (None, True, "alpaca", None),
        (None, False, "alpaca", "alpaca"),
        (None, False, None, None),
    ],
)
def test_what_is_typed_wins_then_the_tokenizers_own_then_the_models(
    tokenizer: Any, typed: str | None, own: bool, of_model: str | None, used: str | None
) -> None:
    if not own:
        tokenizer.chat_template = None
    data = DataConfig(chat_template=typed, val_set_size=7)
    chosen = with_chat_template(data, ModelConfig(chat_template=of_model), tokenizer)
    assert (chosen.chat_template, chosen.val_set_size) == (used, 7)
    assert data.chat_template == typed, "what was typed is not changed"


def test_the_models_template_is_what_a_run_uses(plain_base: Path, tmp_path: Path) -> None:
    words = {"model.path": plain_base, "model.chat_template": "alpaca", "trainer.max_steps": 1}
    run = train_into(tmp_path / "run", *(f"{key}={value}" for key, value in words.items()))
    used = json.loads((run / "manifest.json").read_text())["template_sha256"]
    assert used == hashlib.sha256(named_template("alpaca").encode()).hexdigest()
    assert (run / "adapter" / "chat_template.jinja").read_text() == named_template("alpaca")


def test_stop_tokens_are_ids_beside_the_eos(tokenizer: Any) -> None:
    assert stop_token_ids(tokenizer, []) == {tokenizer.eos_token_id}
    token = tokenizer.convert_ids_to_tokens(5)
    assert stop_token_ids(tokenizer, [token]) == {tokenizer.eos_token_id, 5}


@pytest.mark.parametrize(
    ("base", "kept"),
    [(None, [3, 7]), (7, [7, 3]), (9, [9, 3, 7]), ([7, 9], [7, 9, 3]), ([3, 7], [3, 7])],
)
def test_answers_end_where_they_were_trained_to(base: Any, kept: list[int], tmp_path: Path) -> None:
    import transformers

    model = SimpleNamespace(generation_config=transformers.GenerationConfig(eos_token_id=base))
    add_stop_tokens(model, {7, 3})
    assert model.generation_config.eos_token_id == kept
    save_stop_tokens(model, tmp_path)
    saved = transformers.GenerationConfig.from_pretrained(tmp_path)
    assert saved.eos_token_id == kept
    alone = SimpleNamespace(generation_config=transformers.GenerationConfig(eos_token_id=2))
    add_stop_tokens(alone, {2})
    assert alone.generation_config.eos_token_id == 2, "one is not a list"


def test_the_token_that_ended_answers_in_training_is_saved(tokenizer: Any, tmp_path: Path) -> None:
    template = tmp_path / "stop.jinja"
    template.write_text(
        "{% for m in messages %}{{ '[' + m.role + '] ' + m.content }}"
        "{{ '<|im_start|>' if m.role == 'assistant' else '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '[assistant] ' }}{% endif %}"
    )
    run = train_into(tmp_path / "run", f"data.chat_template={template}", "trainer.max_steps=1")
    file = run / "adapter" / "generation_config.json"
    ids = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert sorted(json.loads(file.read_text())["eos_token_id"]) == sorted(ids)
    file.write_text(json.dumps({"eos_token_id": [2, 10**9]}))
    config = load_config("evaluate", [f"run={run}"])
    with pytest.raises(UserError, match=r"eos_token_id: 1000000000 is not one of the base's 768"):
        open_tuned(config, resolve_single_device("cpu", "fp32"))


@pytest.mark.parametrize("ids", ["x", [2, -1], [[2]], [2, 10**9], 768])
def test_saved_stop_tokens_that_are_no_ids_are_named(tmp_path: Path, ids: object) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(UserError, match=r"generation_config\.json: eos_token_id: .* is not one of"):
        saved_stop_ids(tmp_path, 768)


def test_an_unknown_stop_token_is_named(tokenizer: Any) -> None:
    token = tokenizer.convert_ids_to_tokens(5)
    with pytest.raises(UserError, match=r"no token <\|eot_id\|>; type 'model.stop_tokens=\[") as e:
        stop_token_ids(tokenizer, [token, "<|eot_id|>"])
    assert f"[{token}]" in str(e.value), "what it has may stay"
