"""What cannot be merged or talked to is refused in words, exit code 2, at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.config.conf_files import save_config
from app.config.load import load_config
from tests.tiny import TINY_BASE

Refused = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run of the shipped base, whose adapter is of another one."""
    folder = tmp_path / "run"
    (folder / "adapter").mkdir(parents=True)
    config = load_config("train", ["+experiment=quickstart"])
    save_config(config, folder / "config.yaml")
    (folder / "metrics.json").write_text("{}")
    return folder


@pytest.fixture
def refused(type_verb: Callable[..., tuple[int, str]]) -> Refused:
    """Return what merges, and returns what is said with exit code 2."""

    def merge(*words: str) -> str:
        code, said = type_verb("merge", *words)
        assert code == 2
        return said

    return merge


def write_adapter(folder: Path, width: int = 8, **settings: Any) -> None:
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    said = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]} | settings
    (folder / "adapter_config.json").write_text(json.dumps(said))
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {
        f"{name}.lora_A.weight": torch.ones(2, width),
        f"{name}.lora_B.weight": torch.ones(width, 2),
    }
    save_file(tensors, folder / "adapter_model.safetensors")


def test_a_base_without_an_adapter(refused: Refused) -> None:
    assert "nothing to merge" in refused(f"model.path={TINY_BASE}")


def test_an_adapter_of_another_base(tmp_path: Path, refused: Refused) -> None:
    write_adapter(tmp_path / "adapter")
    words = (f"model.path={TINY_BASE}", f"adapter_path={tmp_path / 'adapter'}")
    said = refused(*words, f"output.dir={tmp_path / 'out'}")
    assert "128" in said and not (tmp_path / "out").exists()
    (tmp_path / "adapter" / "base.json").write_text(
        json.dumps({"path": "elsewhere/base", "fingerprint": "0" * 64, "weights": "0" * 64})
    )
    assert "elsewhere/base" in refused(*words)


def test_an_adapter_of_another_vocabulary(tmp_path: Path, refused: Refused) -> None:
    write_adapter(tmp_path / "adapter", 128, trainable_token_indices=[5000])
    words = (f"model.path={TINY_BASE}", f"adapter_path={tmp_path / 'adapter'}")
    assert "5000" in refused(*words).replace(",", "")


def test_a_run_of_full_training_is_a_model_already(run: Path, refused: Refused) -> None:
    (run / "adapter").rmdir()
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text("{}")
    said = refused(f"run={run}")
    assert "is already a full model" in said and str(run / "model") in said
    (run / "checkpoints" / "step-4").mkdir(parents=True)
    config = load_config("train", ["+experiment=quickstart", "adapter=full"])
    save_config(config, run / "config.yaml")
    (run / "metrics.json").unlink()
    said = refused(f"run={run}", "merge.checkpoint=newest", f"output.dir={run / 'out'}")
    assert "trains the base weights" in said


def test_an_unfinished_run(run: Path, refused: Refused) -> None:
    (run / "metrics.json").unlink()
    assert "not the folder of a finished training run" in refused(f"run={run}")
    (run / "checkpoints" / "step-4").mkdir(parents=True)
    said = refused(f"run={run}")
    assert "the run is not finished" in said and f"app.train resume={run}" in said
    assert "or use that with checkpoint=newest" in said
    told = ("merge.checkpoint=newest", f"output.dir={run.parent / 'out'}")
    assert "there is no valid checkpoint" in refused(f"run={run}", *told)
    write_adapter(run / "adapter", 128)
    said = refused(f"model.path={TINY_BASE}", *told, f"adapter_path={run / 'adapter'}")
    assert "type run=FOLDER" in said


def test_further_adapters_that_are_not_there(tmp_path: Path, refused: Refused) -> None:
    write_adapter(tmp_path / "adapter", 128)
    words = (f"model.path={TINY_BASE}", f"adapter_path={tmp_path / 'adapter'}")
    said = refused(*words, "merge.adapters=[{path: nowhere}]")
    assert "merge.adapters[0].path=nowhere: no such folder" in said
    write_adapter(tmp_path / "wide", 256)
    wide = f"merge.adapters=[{{path: {tmp_path / 'adapter'}}},{{path: {tmp_path / 'wide'}}}]"
    said = refused(*words, wide)
    assert f"merge.adapters[1].path={tmp_path / 'wide'}" in said and "another base" in said
    assert "expected" in refused(*words, "merge.adapters=[{path: x, weight: 99}]")
