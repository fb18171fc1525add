"""Bases of a kind that cannot be trained here are refused by what their config.json says."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from transformers import CONFIG_MAPPING

from app.model.base import DRAFTS, ModelConfig, load_architecture, why_not_saved_whole
from app.process.errors import UserError


def said_of(folder: Path, **numbers: Any) -> str:
    (folder / "config.json").write_text(json.dumps(numbers))
    with pytest.raises(UserError) as error:
        load_architecture(ModelConfig(path=str(folder)))
    return str(error.value)


def test_a_model_type_of_a_newer_transformers_names_the_version(tmp_path: Path) -> None:
    said = said_of(tmp_path, model_type="llama9", transformers_version="99.1.0")
    assert (
        "does not know its model_type 'llama9'; its config.json is of transformers 99.1.0" in said
    )
    command = said.rpartition(": type ")[2].partition(",")[0]
    pip, install, what = shlex.split(command)
    assert (pip, install) == ("pip", "install")
    assert str(Requirement(what)) == "transformers>=99.1.0"


@pytest.mark.parametrize("version", [None, "4.57.0", "unknown", 5, ["5"]])
def test_a_model_type_that_no_version_is_known_of(version: Any, tmp_path: Path) -> None:
    said = said_of(tmp_path, model_type="llama9", transformers_version=version)
    assert "'llama9'; take a newer transformers, or take another base" in said


@pytest.mark.parametrize("model_type", ["vit", "wav2vec2", "voxtral", "whisper"])
def test_a_model_that_does_not_write_text_for_text(model_type: str, tmp_path: Path) -> None:
    said = said_of(tmp_path, model_type=model_type)
    assert f"{model_type} models are not language models to train" in said
    assert said.endswith("type model.path=ANOTHER_BASE")


@pytest.mark.parametrize("model_type", DRAFTS)
def test_a_model_that_drafts_for_another(model_type: str, tmp_path: Path) -> None:
    said = said_of(tmp_path, model_type=model_type)
    assert f"{model_type} models draft for another model" in said
    assert said.endswith("type model.path=ANOTHER_BASE")


def test_a_model_that_could_not_be_opened_again_is_not_trained_whole() -> None:
    reason = why_not_saved_whole(CONFIG_MAPPING["mllama"]())
    assert reason is not None and reason.endswith("opens none of that type: type adapter=lora")
    for model_type in ("llama", "gemma3", "t5"):
        assert why_not_saved_whole(CONFIG_MAPPING[model_type]()) is None
