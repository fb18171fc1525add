"""Attention that this machine cannot run is refused before torch is imported, with what to type."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.door import ask, make_adapter, make_data, make_model

ON_GPU = ["flash2", "flash3", "varlen", "flex"]
IN_HALF = ["flash2", "flash3", "varlen"]


@pytest.fixture
def base(tmp_path: Path) -> list[str]:
    model, data = make_model(tmp_path / "model"), make_data(tmp_path / "data.jsonl")
    return [f"model.path={model}", f"data.datasets=[{{path: {data}}}]"]


@pytest.fixture
def _with_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: module)


@pytest.mark.usefixtures("_with_packages")
@pytest.mark.parametrize("backend", ON_GPU)
def test_on_the_cpu_it_says_why_and_what_keeps_documents_apart_there(
    base: list[str], backend: str, tmp_path: Path
) -> None:
    for gpus, words in ((0, []), (2, ["trainer.accelerator=cpu"])):
        answer = ask(*base, *words, f"attention={backend}", gpus=gpus)
        assert answer.code == 2
        assert f"attention={backend} " in answer.said and "this run is on the CPU" in answer.said
        assert "let those of a pack see each other; type attention=sdpa" in answer.said
    adapter = f"adapter_path={make_adapter(tmp_path / 'adapter')}"
    measured = ask(*base, adapter, f"attention={backend}", verb="evaluate")
    assert measured.code == 2 and "type attention=sdpa" in measured.said
    assert ask(*base, "attention=sdpa").code == 0
    assert ask(*base, f"attention={backend}", gpus=1).code == 0


@pytest.mark.usefixtures("_with_packages")
@pytest.mark.parametrize("backend", ON_GPU)
def test_kernels_of_half_precision_and_fp32(base: list[str], backend: str) -> None:
    answer = ask(*base, f"attention={backend}", "trainer.precision=fp32", gpus=1)
    if backend not in IN_HALF:
        assert answer.code == 0
        return
    assert answer.code == 2
    assert f"attention={backend} computes in half precision alone" in answer.said
    assert "type trainer.precision=bf16, or attention=sdpa" in answer.said


@pytest.mark.parametrize(
    ("backend", "package"), [("flash2", "flash-attn"), ("flash3", "flash-attn-3")]
)
def test_a_package_that_is_not_installed(
    base: list[str], backend: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    answer = ask(*base, f"attention={backend}", gpus=1)
    assert answer.code == 2
    assert (
        f"needs the package {package}, which is not installed; type attention=varlen" in answer.said
    )
    assert ask(*base, "attention=varlen", gpus=1).code == 0


def test_a_word_that_is_no_attention(base: list[str]) -> None:
    answer = ask(*base, "attention.backend=flash")
    assert answer.code == 2
    for backend in ("auto", *ON_GPU, "sdpa", "eager"):
        assert backend in answer.said
