"""What a model's config says of chat: the template for a tokenizer without one, and stop tokens."""

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
    save_stop_tokens,
    saved_stop_ids,
    stop_token_ids,
    with_chat_template,
)
from app.training.trainer import resolve_single_device
from common.errors import UserError
from data_modules import DataConfig
from data_modules.template.named_templates import named_template
from tests.in_process import run_command
from tests.tiny import TINY_BASE, small_run, train_into


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


def test_a_misspelt_template_of_a_model_is_refused() -> None:
    result = run_command(*small_run(), "model.chat_template=lama2")
    assert result.code == 2
    assert "model.chat_template=lama2" in result.stderr
    assert "did you mean llama2?" in result.stderr
    assert run_command(*small_run(), "model.chat_template=llama2").code == 0


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


@pytest.mark.parametrize(
    ("adapter", "folder"),
    [("lora", "adapter"), pytest.param("full", "model", marks=pytest.mark.slow)],
)
def test_the_token_that_ended_answers_in_training_is_saved(
    adapter: str, folder: str, tokenizer: Any, tmp_path: Path
) -> None:
    template = tmp_path / "stop.jinja"
    template.write_text(
        "{% for m in messages %}{{ '[' + m.role + '] ' + m.content }}"
        "{{ '<|im_start|>' if m.role == 'assistant' else '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '[assistant] ' }}{% endif %}"
    )
    words = (f"data.chat_template={template}", f"adapter={adapter}", "trainer.max_steps=1")
    run = train_into(tmp_path / "run", *words)
    saved = json.loads((run / folder / "generation_config.json").read_text())
    ids = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert sorted(saved["eos_token_id"]) == sorted(ids)


@pytest.mark.parametrize("ids", ["x", [2, -1], [[2]], [2, 10**9], 768])
def test_saved_stop_tokens_that_are_no_ids_are_named(tmp_path: Path, ids: object) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(UserError, match=r"generation_config\.json: eos_token_id: .* is not one of"):
        saved_stop_ids(tmp_path, 768)


def test_saved_stop_tokens_are_tokens_of_the_base(tmp_path: Path) -> None:
    run = train_into(tmp_path / "run", "trainer.max_steps=1")
    file = run / "adapter" / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": [2, 10**9]}))
    config = load_config("evaluate", [f"run={run}"])
    with pytest.raises(UserError, match=r"eos_token_id: 1000000000 is not one of the base's 768"):
        open_tuned(config, resolve_single_device("cpu", "fp32"))


def test_an_unknown_stop_token_is_named_before_anything_trains(
    tokenizer: Any, tmp_path: Path
) -> None:
    token = tokenizer.convert_ids_to_tokens(5)
    with pytest.raises(UserError, match=r"no token <\|eot_id\|>; type 'model.stop_tokens=\[") as e:
        stop_token_ids(tokenizer, [token, "<|eot_id|>"])
    assert f"[{token}]" in str(e.value), "what it has may stay"
    with pytest.raises(UserError, match=r"model\.stop_tokens"):
        train_into(tmp_path / "run", "model.stop_tokens=[nowhere]")
    assert not (tmp_path / "run" / "metrics.csv").exists()
