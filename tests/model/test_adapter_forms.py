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

from app.model.adapter import (
    load_adapter,
    read_weight_changes,
    save_adapter,
    verify_adapter,
    write_origin,
)
from app.model.adapter.settings import RULES, UNSUPPORTED, WITHOUT_EFFECT, read_adapter_config
from common.errors import UserError
from tests.tiny import move, tiny_llama

IDS = torch.arange(3, 20)[None]
TARGETS = ["q_proj", "v_proj"]
EMBEDDING = "base_model.model.model.embed_tokens"
CHANGES_BASE, BIASES, TIED = "has changed the base", "trains biases", "one side only"
FORMS: dict[str, tuple[dict[str, Any], str | None, str | None]] = {
    "plain": ({}, None, None),
    "all biases": ({"bias": "all"}, BIASES, BIASES),
    "biases of targets": ({"bias": "lora_only"}, BIASES, BIASES),
    "biases of B": ({"lora_bias": True}, None, None),
    "PiSSA": ({"init_lora_weights": "pissa"}, CHANGES_BASE, CHANGES_BASE),
    "OLoRA": ({"init_lora_weights": "olora"}, CHANGES_BASE, CHANGES_BASE),
    "orthogonal": ({"init_lora_weights": "orthogonal"}, None, None),
    "embedding": ({"target_modules": [*TARGETS, "embed_tokens"]}, None, None),
    "head": ({"target_modules": [*TARGETS, "lm_head"]}, None, None),
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
    model = peft.get_peft_model(base(is_tied=is_tied), config).eval()
    move(model)
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
    continued = load_adapter(base(is_tied=is_tied), tmp_path, trainable=True)
    move(continued)
    save_adapter(continued, tmp_path / "saved")
    assert verify_adapter(continued, tmp_path / "saved", {"input_ids": IDS}) < 1e-5


@pytest.mark.parametrize("init", ["pissa_niter_4", "anything"])
def test_inits_that_cannot_be_repeated(init: str, tmp_path: Path) -> None:
    make(tmp_path, is_tied=False)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"init_lora_weights": init}))
    assert f"init_lora_weights='{init}': expected" in read_adapter_config(tmp_path)[1][0]


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
    undecided = fields - RULES["LORA"].keys() - WITHOUT_EFFECT - UNSUPPORTED.keys()
    assert not undecided, "decide these in app/model/adapter/settings.py"
    assert not RULES["LORA"].keys() & (WITHOUT_EFFECT | UNSUPPORTED.keys())


def test_fields_that_are_not_supported(tmp_path: Path) -> None:
    make(tmp_path, is_tied=False)
    file = tmp_path / "adapter_config.json"
    saved = json.loads(file.read_text())
    for key in UNSUPPORTED:
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
VALUES_OF_IA3: dict[str, tuple[list[Any], list[Any]]] = {
    "task_type": (["CAUSAL_LM", "SEQ_2_SEQ_LM", None], ["SEQ_CLS", "TOKEN_CLS", "nonsense", 3]),
    "peft_type": (["IA3"], ["LORA", None, 3]),
    "auto_mapping": ([None, {"base_model_class": "x"}, "x"], []),
    "peft_version": ([None, "0.1", 3], []),
    "base_model_name_or_path": ([None, "elsewhere"], [3]),
    "revision": ([None, "abc"], [3]),
    "inference_mode": ([True, False], ["yes"]),
    "target_modules": (
        [ALL, [*ALL, "lm_head"], r".*\.(k|v|down)_proj", r"model\.layers\.0\..*(k|down)_proj"],
        [["k_proj"], [*ALL, "embed_tokens"], "k_proj", [], ["none"], "(", [*ALL, 3], 3, {"a": 1}],
    ),
    "exclude_modules": ([None, [], ["k_proj"], r".*layers\.0.*"], [ALL, 3, "("]),
    "feedforward_modules": (
        [["down_proj"], [], None, ALL, ".*down_proj", ".*", "none"],
        [["gate_proj"], ["q_proj", "down_proj"], ["proj"], "(", 3, [3]],
    ),
    "fan_in_fan_out": ([False, True], [None, "no"]),
    "modules_to_save": ([None, [], ["lm_head"], ["embed_tokens"], ["norm"]], ["lm_head", 3]),
    "init_ia3_weights": ([True, False], [None, "random"]),
}
"""field of peft's IA3Config -> values that are used as peft does, values that are refused"""


def test_every_field_of_ia3_is_swept() -> None:
    assert VALUES_OF_IA3.keys() == {field.name for field in dataclasses.fields(peft.IA3Config)}


@pytest.mark.parametrize("key", VALUES_OF_IA3)
def test_each_field_of_ia3_is_used_as_peft_does_or_refused(key: str, tmp_path: Path) -> None:
    used, refused = VALUES_OF_IA3[key]
    for number, value in enumerate([*used, *refused]):
        folder = tmp_path / str(number)
        is_made_by_peft = number < len(used) and key != "peft_type"
        settings = IA3 | ({key: value} if is_made_by_peft else {})
        made = peft.get_peft_model(base(is_tied=False), peft.IA3Config(**settings)).eval()
        for name, parameter in made.named_parameters():
            if "ia3_l" in name:
                parameter.data += 0.3 * torch.randn_like(parameter)
        made.save_pretrained(folder)
        file = folder / "adapter_config.json"
        if number >= len(used):
            file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
            for trainable in (False, True):
                with pytest.raises(UserError, match=r"adapter in|adapter_config.json: "):
                    load_adapter(base(is_tied=False), folder, trainable=trainable)
            continue
        loaded = load_adapter(base(is_tied=False), folder)
        torch.testing.assert_close(loaded(IDS).logits, made(IDS).logits)
        continued = load_adapter(base(is_tied=False), folder, trainable=True)
        move(continued)
        save_adapter(continued, folder / "saved")
        assert verify_adapter(continued, folder / "saved", {"input_ids": IDS}) < 1e-5
