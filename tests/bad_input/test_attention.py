"""Attention that this machine cannot run is refused before torch is imported, with what to type."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.door import ask, make_adapter, make_data, make_model

ON_GPU = ["flash2", "flash3", "varlen", "flex"]


@pytest.fixture
def base(tmp_path: Path) -> list[str]:
    model, data = make_model(tmp_path / "model"), make_data(tmp_path / "data.jsonl")
    return [f"model.path={model}", f"data.datasets=[{{path: {data}}}]"]


@pytest.fixture
def _with_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: module)


@pytest.mark.usefixtures("_with_packages")
def test_attention_for_gpus_is_refused_on_the_cpu_by_training_and_evaluation(
    base: list[str], tmp_path: Path
) -> None:
    adapter = f"adapter_path={make_adapter(tmp_path / 'adapter')}"
    for verb, words in (("train", []), ("evaluate", [adapter])):
        answer = ask(*base, *words, "attention=flash2", verb=verb)
        assert answer.code == 2 and "attention=flash2 needs an NVIDIA GPU" in answer.said
        assert "let the documents of a pack see each other; type attention=sdpa" in answer.said
        assert ask(*base, *words, "attention=sdpa", verb=verb).code == 0


def test_a_word_that_is_no_attention(base: list[str]) -> None:
    answer = ask(*base, "attention.backend=flash")
    assert answer.code == 2
    for backend in ("auto", *ON_GPU, "sdpa", "eager"):
        assert backend in answer.said
