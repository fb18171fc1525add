"""What the tests keep of compositions (tests/composing.py) changes none of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from app.config import load_config
from common.installation import ROOT

COMPOSED = [
    ["+experiment=quickstart", "adapter=full", "optimizer.lr=1e-5"],
    ["model=tiny", "data=skills", "adapter=ia3"],
]


def test_they_equal_those_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own.yaml"
    choices = "defaults:\n  - override /adapter: lora\n  - _self_\n"
    of_own = [[f"+experiment={own}"], [f"+experiment={own}", "trainer.max_steps=9"]]
    made_anew = (
        "import json, sys; from app.config import load_config\n"
        "for words in json.loads(sys.argv[1]): print(repr(load_config('train', words)))"
    )
    for values, composed in (
        ("trainer: {max_steps: 3}\n", [*COMPOSED, *of_own]),
        ("trainer: {max_steps: 5}\nseed: 7\n", of_own),
    ):
        own.write_text(f"# @package _global_\n{choices}{values}")
        monkeypatch.setenv("LOFT_DATA_CACHE", str(tmp_path / f"cache{len(composed)}"))
        kept = [repr(load_config("train", words)) for words in composed]
        command = [sys.executable, "-c", made_anew, json.dumps(composed)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines() == kept
        assert all(f"cache{len(composed)}'" in text for text in kept)
