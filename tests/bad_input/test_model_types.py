"""Bases of a kind that cannot be trained here are refused by what their config.json says."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.requirements import Requirement

from app.model.architecture import CORRECT_SINCE, DRAFTS, load_architecture
from app.model.base import ModelConfig, load_base
from app.model.description import BaseDescription
from app.preflight.base_model import inspect_base
from app.preflight.files import check_sequence_len
from common.errors import UserError
from tests.multimodal import tiny_multimodal
from tests.parity.every_family import tiny_config
from tests.tiny import save_with_tokenizer


def said_of(folder: Path, **numbers: Any) -> str:
    (folder / "config.json").write_text(json.dumps(numbers))
    with pytest.raises(UserError) as error:
        load_architecture(ModelConfig(path=str(folder)))
    return str(error.value)


def test_a_model_type_of_a_newer_transformers_names_the_version(tmp_path: Path) -> None:
    said = said_of(tmp_path, model_type="llama9", transformers_version="99.1.0")
    assert (
        "does not know its model_type 'llama9'; its config.json was written by transformers 99.1.0"
        in said
    )
    command = said.rpartition(": type ")[2].partition(",")[0]
    pip, install, what = shlex.split(command)
    assert (pip, install) == ("pip", "install")
    assert str(Requirement(what)) == "transformers>=99.1.0"


@pytest.mark.parametrize("version", [None, "4.57.0", 5])
def test_a_model_type_that_no_version_is_known_of(version: Any, tmp_path: Path) -> None:
    said = said_of(tmp_path, model_type="llama9", transformers_version=version)
    assert "'llama9'; install a newer transformers, or take another base" in said


IMAGES = "do not run on text alone (their forward pass needs pixel_values"


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        *((name, "are not language models:") for name in ("vit", "clip", "whisper")),
        *((name, IMAGES) for name in ("blip-2", "instructblip")),
        *((name, "are draft models") for name in DRAFTS),
    ],
)
def test_a_model_that_does_not_write_text_for_text(
    model_type: str, reason: str, tmp_path: Path
) -> None:
    said = said_of(tmp_path, model_type=model_type)
    assert f"{model_type} models {reason}" in said
    assert said.endswith("type model.path=ANOTHER_BASE")


def test_a_multimodal_model_from_scratch() -> None:
    from_scratch = ModelConfig(from_scratch=True, architecture={"model_type": "gemma3"})
    with pytest.raises(
        UserError, match=r"type its values, with model\.architecture\.model_type=gemma3_text"
    ):
        load_architecture(from_scratch)


def test_layers_of_a_language_model_that_would_be_left_out(tmp_path: Path) -> None:
    base = save_with_tokenizer(tiny_multimodal("gemma3"), tmp_path / "base")
    file = base / "config.json"
    numbers = json.loads(file.read_text())
    numbers["text_config"]["num_hidden_layers"] = 1
    numbers["text_config"]["layer_types"] = numbers["text_config"]["layer_types"][:1]
    file.write_text(json.dumps(numbers))
    _, (problem,) = inspect_base(ModelConfig(path=str(base)))
    assert f"{file}: num_hidden_layers=1, but the weight files have 2 layers" in problem
    with pytest.raises(
        UserError, match=r"tensors in its files would not be used, .*language_model"
    ):
        load_base(ModelConfig(path=str(base)), "eager", torch.float32)


def test_a_length_beyond_the_context_of_a_language_model(tmp_path: Path) -> None:
    numbers = {"model_type": "gemma3", "text_config": {"max_position_embeddings": 128}}
    (problem,) = check_sequence_len(129, BaseDescription(name="base", config=numbers))
    assert "type data.sequence_len=128, or model.context_len=129 to" in problem
    # The positions of a T5 are relative, whatever length its config has.
    t5 = {"model_type": "t5", "n_positions": 128, "relative_attention_num_buckets": 32}
    assert check_sequence_len(129, BaseDescription(name="base", config=t5)) == []


@pytest.mark.parametrize("model_type", CORRECT_SINCE)
def test_a_model_type_whose_layers_are_wrong_in_an_older_transformers(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the chunks of Nemotron-H's scan, whose numbers differ from 129 tokens on."""
    since, fault = CORRECT_SINCE[model_type]
    tiny_config(model_type).save_pretrained(tmp_path)
    monkeypatch.setattr(transformers, "__version__", since)
    load_architecture(ModelConfig(path=str(tmp_path)))
    monkeypatch.setattr(transformers, "__version__", "5.3.0")
    with pytest.raises(UserError) as error:
        load_architecture(ModelConfig(path=str(tmp_path)))
    wrong = f"in transformers 5.3.0, {model_type} models {fault}: "
    assert str(error.value).endswith(f"{wrong}type pip install 'transformers>={since}'")
