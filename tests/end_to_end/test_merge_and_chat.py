"""What was trained is merged, talked to and loaded by others, and answers as it was measured."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from app.config import load_config
from tests.conftest import ROOT
from tests.tiny import TINY_BASE, move

QUESTION = "Sort: pear, apple, fig"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the shipped base that has learned something, and nothing useful."""
    import torch

    from app.model.adapter import LoraConfig, apply_adapter, save_adapter
    from app.model.base import ModelConfig, load_base

    folder = tmp_path_factory.mktemp("adapter")
    model = load_base(ModelConfig(path=str(TINY_BASE)), "sdpa", torch.float32)
    adapted = apply_adapter(model, LoraConfig(r=4), half_precision=False)
    move(adapted, scale=0.02)
    save_adapter(adapted, folder)
    return folder


def words_of(adapter: Path) -> list[str]:
    return [f"model.path={TINY_BASE}", f"adapter_path={adapter}", "trainer.precision=fp32"]


def merge_into(folder: Path, *words: str) -> Any:
    from app.merge import merge

    os.environ.pop("LOFT_RUN_DIR", None)
    return merge(load_config("merge", [*words, f"output.dir={folder}"]))


def talk(monkeypatch: pytest.MonkeyPatch, folder: Path, lines: str, *words: str) -> list[Any]:
    """Chat from a pipe; returns the conversations that were left, as messages."""
    from app.chat import chat

    monkeypatch.delenv("LOFT_RUN_DIR", raising=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    chat(load_config("chat", [*words, f"output.dir={folder}"]))
    monkeypatch.delenv("LOFT_RUN_DIR", raising=False)
    rows = (folder / "conversations.jsonl").read_text().splitlines()
    return [json.loads(row)["messages"] for row in rows]


def test_merged_and_unmerged_give_the_same_answers(
    adapter: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = merge_into(tmp_path / "merged", *words_of(adapter), "merge.dtype=fp32")
    said = capsys.readouterr().out
    assert found.agreement == 1 and "merge verified: within differences of 0.001" in said
    assert "chat template verified" in said and said.endswith(f"run: {tmp_path / 'merged'}\n")
    card = (tmp_path / "merged" / "README.md").read_text()
    assert "library_name: transformers" in card and str(ROOT) not in card

    lines = f"{QUESTION}\nAnd now?\n/reset\n/what\n{QUESTION}\n/compare\n/exit\nnever read\n"
    short = "chat.max_new_tokens=12"
    before = talk(monkeypatch, tmp_path / "a", lines, *words_of(adapter), short)
    screen = capsys.readouterr().out
    assert "no command /what" in screen and "base" in screen and "tuned" in screen
    assert before[0][1]["content"] in screen
    assert [[turn["role"] for turn in row] for row in before] == [
        ["user", "assistant", "user", "assistant"],
        ["user", "assistant"],
    ]
    assert before[0][:2] == before[1]
    merged = [f"model.path={tmp_path / 'merged'}", "trainer.precision=fp32", short]
    assert talk(monkeypatch, tmp_path / "b", lines.replace("/compare\n", ""), *merged) == before


def test_a_chat_begins_with_its_system_prompt_and_outlives_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"model.path={TINY_BASE}", "chat.system=Be brief.", "chat.max_new_tokens=3"]
    lines = f"/compare\n{'long ' * 3000}\nhi\n/save {tmp_path / 'mine.jsonl'}\n"
    (row,) = talk(monkeypatch, tmp_path / "chat", lines, *words)
    screen = capsys.readouterr().out
    assert "there is no adapter here" in screen and "the model's context is" in screen
    assert [turn["role"] for turn in row] == ["system", "user", "assistant"]
    assert json.loads((tmp_path / "mine.jsonl").read_text())["messages"] == row
