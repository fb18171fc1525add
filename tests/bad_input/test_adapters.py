"""A saved adapter that does not fit its base, files or settings is refused before loading."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.model.adapter import LoraConfig, write_origin
from app.model.base import ModelConfig
from app.preflight import describe_base
from app.preflight.files import check_same_settings
from tests.in_process import (
    CommandResult,
    accepted,
    make_adapter,
    make_data,
    make_model,
    run_command,
    write_safetensors,
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model", num_hidden_layers=2)


@pytest.fixture
def words(tmp_path: Path, model: Path) -> list[str]:
    return [f"model.path={model}", f"data.datasets=[{{path: {make_data(tmp_path / 'd.jsonl')}}}]"]


@pytest.fixture
def adapter(tmp_path: Path, model: Path) -> Path:
    """An adapter that was made on `model`."""
    folder = make_adapter(tmp_path / "adapter")
    write_origin(folder, describe_base(ModelConfig(path=str(model))))
    return folder


def refused(result: CommandResult, *fragments: str) -> None:
    assert result.code == 2, result.stderr
    for fragment in fragments:
        assert fragment in result.stderr
    assert "Traceback" not in result.stderr


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
EMPTY = {"base_model.model.a.lora_A.weight": [4, 32], "base_model.model.a.lora_B.weight": [0]}


def change_the_base(adapter: Path) -> None:
    file = adapter.parent / "model" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def change_the_config_of_the_base(adapter: Path) -> None:
    file = adapter.parent / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_theta": 5.0}))


BOTH = ("no config", "another base")
"""damages that are refused by training and evaluation, for all of which one check decides"""
DAMAGES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "no config": (lambda adapter: (adapter / CONFIG).unlink(), ["KEY=",
        "the folder has no adapter_config.json"]),
    "another kind": (
        lambda adapter: (adapter / CONFIG).write_text('{"peft_type": "PREFIX_TUNING"}'),
        ["peft_type 'PREFIX_TUNING' is not supported", "LORA or IA3"]),
    "a pickle": (lambda adapter: (adapter / WEIGHTS).rename(adapter / "adapter_model.bin"), ["KEY=",
        "adapter_model.bin is a pickle", "save_file(torch.load("]),
    "cut off": (lambda adapter: os.truncate(adapter / WEIGHTS,
        (adapter / WEIGHTS).stat().st_size - 8), ["cut off", "download it again"]),
    "one is empty": (lambda adapter: write_safetensors(adapter / WEIGHTS, EMPTY),
        ["1 of 2 tensors are empty", "lora_B"]),
    "another base": (change_the_base, ["KEY=", "trained on another base", "weights differ (",
        "model.path="]),
    "another config": (change_the_config_of_the_base, ["KEY=", "trained on another base",
        "config.json or shapes differ ("]),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_an_adapter_that_cannot_be_used_is_refused_by_training_and_evaluation(
    name: str, words: list[str], adapter: Path
) -> None:
    damage, fragments = DAMAGES[name]
    damage(adapter)
    keys = {"train": "adapter.path", "evaluate": "adapter_path"}
    for verb in ("train", "evaluate") if name in BOTH else ("train",):
        result = run_command(*words, f"{keys[verb]}={adapter}", verb=verb)
        refused(result, *(text.replace("KEY", keys[verb]) for text in fragments))


def test_an_adapter_is_accepted_by_training_and_evaluation(words: list[str], adapter: Path) -> None:
    accepted(*words, f"adapter.path={adapter}")
    accepted(*words, f"adapter_path={adapter}", verb="evaluate")


def test_a_base_that_was_moved_is_the_same_base(
    tmp_path: Path, words: list[str], adapter: Path
) -> None:
    moved = make_model(tmp_path / "moved", num_hidden_layers=2)
    accepted(f"model.path={moved}", words[1], f"adapter.path={adapter}")
    origin = json.loads((adapter / "base.json").read_text())
    assert origin["path"] != str(moved)


def test_bases_of_the_hub_are_compared_by_name(words: list[str], adapter: Path) -> None:
    """They have no fingerprint before they are fetched."""
    ask_for = [words[1], f"adapter.path={adapter}"]
    accepted("model.path=org/name", *ask_for)  # made on a folder: nothing to compare
    commits = ("0a" * 20, "0b" * 20)
    base = ModelConfig(path="org/name", revision=commits[0])
    write_origin(adapter, describe_base(base))
    accepted("model.path=org/name", *ask_for)
    accepted("model.path=org/name", f"model.revision='{commits[0]}'", *ask_for)
    accepted("model.path=org/name", "model.revision=v1.0", *ask_for)  # it may be that commit
    refused(
        run_command("model.path=org/name", f"model.revision='{commits[1]}'", *ask_for),
        f"trained on another base: org/name at {commits[0]}",
        f"model.path=org/name at {commits[1]}: revision differs",
    )
    refused(run_command("model.path=org/other", *ask_for), "model.path=org/other: path differs")


def test_an_adapter_of_elsewhere_is_compared_by_shape(tmp_path: Path, words: list[str]) -> None:
    fits = make_adapter(tmp_path / "fits", base_model_name_or_path="someone/else")
    accepted(*words, f"adapter.path={fits}")
    wide = make_adapter(tmp_path / "wide", hidden=48)
    refused(
        run_command(*words, f"adapter.path={wide}"),
        "layers.0.self_attn.q_proj.lora_A.weight is 4 x 48",
        "is 32 x 32; it was trained on another base",
    )
    other = make_adapter(tmp_path / "other")
    shapes = {f"base_model.model.encoder.q.lora_{p}.weight": [32, 32] for p in "AB"}
    write_safetensors(other / "adapter_model.safetensors", shapes)
    refused(run_command(*words, f"adapter.path={other}"), "has none of its 1 matrices")


def test_tokens_that_an_adapter_was_trained_with_must_be_known(
    words: list[str], model: Path, adapter: Path
) -> None:
    vocab = {"model": {"vocab": {"a": 0, "<|old|>": 1}}, "added_tokens": [{"content": "<|end|>"}]}
    (model / "tokenizer.json").write_text(json.dumps(vocab))
    write_origin(adapter, describe_base(ModelConfig(path=str(model))))
    vocab["added_tokens"] += [{"content": "<|old|>"}, {"content": "<|a|>"}, {"content": "<|b|>"}]
    (adapter / "tokenizer.json").write_text(json.dumps(vocab))
    for key, verb in (("adapter.path", "train"), ("adapter_path", "evaluate")):
        typed = [*words, f"{key}={adapter}"]
        refused(
            run_command(*typed, verb=verb), "<|a|>, <|b|>; type 'model.added_tokens=[<|a|>,<|b|>]'"
        )
        accepted(*typed, "model.added_tokens=[<|a|>,<|b|>]", verb=verb)


SETTINGS: list[tuple[dict[str, Any], dict[str, Any], str, dict[str, Any]]] = [
    # what the file has, what was typed, what must be said, what is right
    ({"r": 16}, {"r": 8}, "has r=16; leave adapter.r out", {"r": 16}),
    (
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": ["k_proj"]},
        "has target_modules=['q_proj', 'v_proj']",
        {"target_modules": ["v_proj", "q_proj"]},
    ),
    (
        {"rank_pattern": {"q_proj": 2}},
        {"rank_pattern": {"q_proj": 3}},
        "has rank_pattern={'q_proj': 2}",
        {"rank_pattern": {"q_proj": 2}},
    ),
    ({"lora_alpha": 8}, {"alpha": 16.0}, "has alpha=8", {"alpha": 8.0}),
    ({"lora_dropout": 0.1}, {"dropout": 0.2}, "has dropout=0.1", {"dropout": 0.1}),
    ({"use_dora": False}, {"use_dora": True}, "has use_dora=False", {"use_dora": False}),
    ({}, {"init": "gaussian"}, "leave adapter.init out", {"init": "default"}),
]


@pytest.mark.parametrize(
    ("saved", "bad", "said", "good"), SETTINGS, ids=[str(s[1]) for s in SETTINGS]
)
def test_a_continued_adapter_keeps_the_settings_of_its_file(
    tmp_path: Path, saved: dict[str, Any], bad: dict[str, Any], said: str, good: dict[str, Any]
) -> None:
    folder = make_adapter(tmp_path / "adapter", **saved)
    (problem,) = check_same_settings(LoraConfig(**bad), folder)
    (name,) = bad
    assert problem.startswith(f"adapter.{name}={bad[name]}, but the adapter in {folder} ")
    assert said in problem
    assert check_same_settings(LoraConfig(**good), folder) == []


def test_ia3_is_continued_as_ia3(tmp_path: Path, words: list[str]) -> None:
    folder = make_adapter(tmp_path / "adapter", peft_type="IA3", feedforward_modules=["down_proj"])
    refused(run_command(*words, f"adapter.path={folder}"), "type adapter=ia3")
    accepted(*words, "adapter=ia3", f"adapter.path={folder}")
    typed = "adapter.feedforward_modules=[up_proj]"
    refused(
        run_command(*words, "adapter=ia3", f"adapter.path={folder}", typed),
        "has feedforward_modules=['down_proj']",
    )


def test_the_run_of_an_evaluation_is_compared_with_its_base(
    tmp_path: Path, words: list[str], adapter: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    adapter.rename(run / "adapter")
    from app.config import load_config, save_config

    save_config(load_config("train", words), run / "config.yaml")
    (run / "metrics.json").write_text("{}")
    accepted(f"run={run}", verb="evaluate")
    change_the_base(tmp_path / "adapter")
    refused(
        run_command(f"run={run}", verb="evaluate"), f"run={run}/adapter was trained on another base"
    )
