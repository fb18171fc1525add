"""Runs on rows longer than the base's context, whose rope is scaled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.config import run_verb
from app.merge import merge
from tests.reliability.shell import Shell
from tests.tiny import SAMPLES


@pytest.mark.slow
def test_the_longer_context_is_merged_with_the_adapter(shell: Shell, tmp_path: Path) -> None:
    run = tmp_path / "run"
    screen = shell.train_into(
        run,
        f"model.path={SAMPLES / 'tiny_base'}",
        f"data.datasets=[{{path: {SAMPLES / 'lists.json'}}}]",
        "model.context_len=4096",
        "model.rope_scaling=linear",
        "data.sequence_len=2048",
        "trainer.max_steps=2",
        "trainer.accelerator=cpu",
    )
    assert "context: 1,024 -> 4,096 tokens (linear, factor 4)" in screen
    words = [f"run={run}", f"output.dir={tmp_path / 'merged'}"]
    assert run_verb("merge", merge, words=words) == 0
    saved = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert saved["max_position_embeddings"] == 4096
    assert saved["rope_parameters"]["rope_type"] == "linear"
    assert saved["rope_parameters"]["factor"] == 4.0
