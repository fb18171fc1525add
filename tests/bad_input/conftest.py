"""What these tests share: a cache of their own, a base, and the tokenizer of the project."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from app.config import run_verb
from tests.in_process import VARIABLES_OF_OTHER_RUNS, make_data
from tests.tiny import TINY_BASE, save_with_tokenizer, tiny_llama


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOFT_DATA_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def type_verb(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Return what runs a verb to its end in this process, and returns its exit code and stderr."""

    def run(verb: str, *words: str) -> tuple[int, str]:
        code = run_verb(verb, getattr(import_module(f"app.{verb}"), verb), words=list(words))
        for name in VARIABLES_OF_OTHER_RUNS:
            os.environ.pop(name, None)
        return code, capsys.readouterr().err

    return run


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base of two layers, the same in several files, an adapter on it and data, to be copied."""
    import peft
    import torch

    folder, model = tmp_path_factory.mktemp("made"), tiny_llama(vocab_size=768)
    for name in ("base", "sharded"):
        save_with_tokenizer(model, folder / name)
    (folder / "sharded" / "model.safetensors").unlink()
    model.save_pretrained(folder / "sharded", max_shard_size="60KB")
    make_data(folder / "d.jsonl")
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    adapted = peft.get_peft_model(model, settings)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(folder / "adapter")
    return folder


@pytest.fixture(scope="session")
def shipped() -> Any:
    """Return the tokenizer that ships with the project."""
    import transformers

    return transformers.AutoTokenizer.from_pretrained(TINY_BASE)


@pytest.fixture
def base(shipped: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return it with its own template, whatever a test before has chosen."""
    monkeypatch.setattr(shipped, "chat_template", shipped.chat_template)
    return shipped
