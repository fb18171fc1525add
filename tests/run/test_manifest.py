from __future__ import annotations

import json
import time
from pathlib import Path

from app.run.manifest import STARTED, save_manifest


def test_a_manifest_says_when_the_command_started_and_of_what(tmp_path: Path) -> None:
    save_manifest(tmp_path, seed=3, base={"path": "x"})
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["started"] == STARTED
    assert time.strptime(STARTED, "%Y-%m-%dT%H:%M:%S%z") <= time.localtime()
    assert manifest["versions"]["datasets"]
    assert (manifest["seed"], manifest["base"]) == (3, {"path": "x"})
    assert str(Path.cwd()) not in {str(value) for value in manifest.values()}
