"""What cannot be talked to is refused in words, exit code 2."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from app.chat import chat
from app.config import load_config, run_verb, save_config
from tests.bad_input.test_merge import write_adapter
from tests.tiny import TINY_BASE


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("a finished run without its adapter", "has neither an adapter nor a model"),
        ("an unfinished run", "the run is not finished"),
        ("an adapter of another base", "is 2 x 8, but"),
        ("an adapter of another vocabulary", "was trained with tokens that the tokenizer in"),
    ],
)
def test_what_cannot_be_talked_to(
    what: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, adapter = tmp_path / "run", tmp_path / "adapter"
    words = [f"run={run}"]
    if "run" in what:
        (run / "checkpoints" / "step-4").mkdir(parents=True)
        save_config(load_config("train", ["+experiment=quickstart"]), run / "config.yaml")
        if "unfinished" not in what:
            (run / "metrics.json").write_text("{}")
    else:
        write_adapter(adapter, 128 if "vocabulary" in what else 8)
        tokens = {"added_tokens": [{"content": "<of another>"}]}
        (adapter / "tokenizer.json").write_text(json.dumps(tokens))
        words = [f"model.path={TINY_BASE}", f"adapter_path={adapter}"]
    os.environ.pop("LOFT_RUN_DIR", None)
    assert run_verb("chat", chat, words=[*words, f"output.dir={tmp_path / 'chat'}"]) == 2
    assert said in capsys.readouterr().err
