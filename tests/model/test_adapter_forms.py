"""Adapters of every field and form of peft: used as peft uses them, or refused before step 1."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from app.model.adapter.saved import load_adapter, read_weight_changes, save_adapter, verify_adapter
from app.model.adapter.settings import (
    RULES,
    UNSUPPORTED_FIELDS,
    WITHOUT_EFFECT,
    read_adapter_config,
    write_origin,
)
from common.errors import UserError
from tests.tiny import move, tiny_llama

IDS = torch.arange(3, 20)[None]
TARGETS = ["q_proj", "v_proj"]
EMBEDDING = "base_model.model.model.embed_tokens"
CHANGES_BASE, BIASES, TIED = "has changed the base", "trains biases", "one side only"
FORMS: dict[str, tuple[dict[str, Any], str | None, str | None]] = {
    "plain": ({}, None, None),
    "all biases": ({"bias": "all"}, BIASES, BIASES),
    "biases of B": ({"lora_bias": True}, None, None),
    "PiSSA": ({"init_lora_weights": "pissa"}, CHANGES_BASE, CHANGES_BASE),
    "both": ({"target_modules": [*TARGETS, "embed_tokens", "lm_head"]}, None, None),
    "whole embedding": ({"modules_to_save": ["embed_tokens"]}, None, None),
    "whole head": ({"modules_to_save": ["lm_head"]}, None, None),
    "tied target": (
        {"target_modules": [*TARGETS, "embed_tokens"], "ensure_weight_tying": True}, None, TIED,
    ),
    "tied embedding": (
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, None, TIED,
    ),
    "tied rows": (
        {"trainable_token_indices": {"embed_tokens": [5]}, "ensure_weight_tying": True}, None, None,
    ),
    "token rows": ({"trainable_token_indices": {"embed_tokens": [5, 6]}}, None, None),
}  # fmt: skip
"""form -> settings of peft, and why it cannot be trained further: on an untied base, on a tied"""


def base(*, is_tied: bool) -> Any:
    torch.manual_seed(0)
    return tiny_llama(vocab_size=64, tie_word_embeddings=is_tied, attention_bias=True)


def make(folder: Path, *, is_tied: bool, **settings: Any) -> torch.Tensor:
    """Save an adapter with peft; return its logits."""
    plain = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS, "task_type": "CAUSAL_LM"}
    config = peft.LoraConfig(**plain | settings)
    model = move(peft.get_peft_model(base(is_tied=is_tied), config).eval())
    model.save_pretrained(folder)
    return model(IDS).logits


ON_A_TIED_BASE = [form for form in FORMS if any(w in form for w in ("tied", "head", "embedding"))]


@pytest.mark.parametrize(
    ("form", "is_tied"),
    [*((form, False) for form in FORMS), *((form, True) for form in ("plain", *ON_A_TIED_BASE))],
)
def test_each_form_is_used_as_peft_does_or_refused(
    form: str, is_tied: bool, tmp_path: Path
) -> None:
    settings, *refusals = FORMS[form]
    logits = make(tmp_path, is_tied=is_tied, **settings)
    loaded = load_adapter(base(is_tied=is_tied), tmp_path)
    torch.testing.assert_close(loaded(IDS).logits, logits)
    if (why := refusals[is_tied]) is not None:
        with pytest.raises(UserError, match=why):
            load_adapter(base(is_tied=is_tied), tmp_path, trainable=True)
        return
    check_continued(tmp_path, is_tied=is_tied)


def check_continued(folder: Path, *, is_tied: bool) -> None:
    continued = load_adapter(base(is_tied=is_tied), folder, trainable=True)
    move(continued)
    save_adapter(continued, folder / "saved")
    assert verify_adapter(continued, folder / "saved", {"input_ids": IDS}) < 1e-5


@pytest.mark.parametrize("what", ["other values", "more rows"])
def test_embeddings_of_another_base(what: str, tmp_path: Path) -> None:
    make(tmp_path, is_tied=False)
    file = tmp_path / "adapter_model.safetensors"
    weight = base(is_tied=False).get_input_embeddings().weight.detach().clone()
    copies = {f"{EMBEDDING}.weight": weight}
    save_file(load_file(file) | copies, file, {"format": "pt"})
    load_adapter(base(is_tied=False), tmp_path)  # a copy of the base's own has no effect
    with pytest.raises(UserError, match="save_embedding_layers=False"):
        read_weight_changes(lambda: base(is_tied=False).to("meta"), [(tmp_path, 1.0)])
    other = weight + 1 if what == "other values" else torch.cat([weight, weight[:1]])
    save_file(load_file(file) | {f"{EMBEDDING}.weight": other}, file, {"format": "pt"})
    with pytest.raises(UserError, match="trained on a base with other embeddings"):
        load_adapter(base(is_tied=False), tmp_path)


def test_every_field_of_peft_is_decided() -> None:
    fields = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    undecided = fields - RULES["LORA"].keys() - WITHOUT_EFFECT - UNSUPPORTED_FIELDS.keys()
    assert not undecided, "decide these in app/model/adapter/settings.py"
    assert not RULES["LORA"].keys() & (WITHOUT_EFFECT | UNSUPPORTED_FIELDS.keys())


def test_fields_that_are_not_supported(tmp_path: Path) -> None:
    make(tmp_path, is_tied=False)
    file = tmp_path / "adapter_config.json"
    saved = json.loads(file.read_text())
    file.write_text(json.dumps(saved | {"init_lora_weights": "pissa_niter_4"}))
    assert "init_lora_weights='pissa_niter_4': expected" in read_adapter_config(tmp_path)[1][0]
    for key in UNSUPPORTED_FIELDS:
        file.write_text(json.dumps(saved | {key: {"a": 1}}))
        assert f"{key}={{'a': 1}} is not supported: " in read_adapter_config(tmp_path)[1][0]


EDITS = {
    "lora_alpha": 80, "r": 8, "use_rslora": True, "use_dora": True, "fan_in_fan_out": True,
    "target_modules": ["q_proj"], "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 2},
    "lora_dropout": 0.5, "modules_to_save": ["lm_head"], "init_lora_weights": "pissa",
}  # fmt: skip


def test_an_edited_file_is_refused(tmp_path: Path) -> None:
    make(tmp_path, is_tied=False)
    write_origin(tmp_path, {"path": "base"})
    file = tmp_path / "adapter_config.json"
    saved = json.loads(file.read_text())
    reordered = {"target_modules": TARGETS[::-1], "base_model_name_or_path": "elsewhere"}
    file.write_text(json.dumps(saved | reordered))
    assert read_adapter_config(tmp_path)[1] == []
    for key, value in EDITS.items():
        file.write_text(json.dumps(saved | {key: value}))
        (problem,) = read_adapter_config(tmp_path)[1]
        assert f"{file}: {key}=" in problem
        assert f"but the adapter was trained with {key}=" in problem
    copy = Path(shutil.copytree(tmp_path, tmp_path / "copy"))
    (copy / "base.json").write_text('{"path": "base"}')  # as the message says, or of earlier runs
    assert read_adapter_config(copy)[1] == []


IA3: dict[str, Any] = {
    "target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"],
}  # fmt: skip
ALL = IA3["target_modules"]
USED: list[dict[str, Any]] = [
    {"task_type": None, "auto_mapping": {"base_model_class": "x"}, "peft_version": "0.1",
     "base_model_name_or_path": "elsewhere", "revision": "abc", "inference_mode": True,
     "fan_in_fan_out": True, "init_ia3_weights": False},
    {"target_modules": [*ALL, "lm_head"], "feedforward_modules": None},
    {"target_modules": r"model\.layers\.0\..*(k|down)_proj"},
    {"exclude_modules": ["k_proj"], "feedforward_modules": []},
    {"exclude_modules": r".*layers\.0.*", "feedforward_modules": ".*down_proj"},
    {"modules_to_save": ["norm"]},
]  # fmt: skip
"""settings of peft's IA3Config that are used as peft does"""
REFUSED: list[dict[str, Any]] = [
    {"task_type": "SEQ_CLS"}, {"peft_type": "LORA"}, {"peft_type": None}, {"revision": 3},
    {"inference_mode": "yes"}, {"target_modules": ["k_proj"]}, {"target_modules": "("},
    {"target_modules": ["none"]}, {"target_modules": [*ALL, "embed_tokens"]},
    {"target_modules": {"a": 1}}, {"exclude_modules": ALL}, {"feedforward_modules": ["gate_proj"]},
    {"feedforward_modules": ["proj"]}, {"modules_to_save": "lm_head"}, {"fan_in_fan_out": "no"},
    {"init_ia3_weights": "random"},
]  # fmt: skip


def make_ia3(folder: Path, **settings: Any) -> torch.Tensor:
    """Save an adapter with peft; return its logits."""
    made = peft.get_peft_model(base(is_tied=False), peft.IA3Config(**IA3 | settings)).eval()
    for name, parameter in made.named_parameters():
        if "ia3_l" in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
    made.save_pretrained(folder)
    return made(IDS).logits


@pytest.mark.parametrize("settings", USED, ids=str)
def test_settings_of_ia3_are_used_as_peft_does(settings: dict[str, Any], tmp_path: Path) -> None:
    logits = make_ia3(tmp_path, **settings)
    loaded = load_adapter(base(is_tied=False), tmp_path)
    torch.testing.assert_close(loaded(IDS).logits, logits)
    check_continued(tmp_path, is_tied=False)


def test_settings_of_ia3_that_are_refused(tmp_path: Path) -> None:
    make_ia3(tmp_path)
    file = tmp_path / "adapter_config.json"
    saved = json.loads(file.read_text())
    for settings in REFUSED:
        file.write_text(json.dumps(saved | settings))
        with pytest.raises(UserError, match=r"adapter in|adapter_config.json: "):
            load_adapter(base(is_tied=False), tmp_path)
    fields = {field.name for field in dataclasses.fields(peft.IA3Config)}
    assert fields == set().union(*USED, *REFUSED)
