"""The commit of a hub base is pinned; tested with a local server of the hub's protocol."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import yaml  # type: ignore[import-untyped]

from tests.conftest import ROOT
from tests.local_server import Handler, local_server
from tests.processes import user_environment
from tests.tiny import TINY_BASE

FIRST, SECOND = "a1" * 20, "b2" * 20


class Hub(Handler):
    """Serve the tiny base as org/base; `main` is the newest commit."""

    main = FIRST
    requests: ClassVar[list[tuple[str, str]]] = []

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        self.requests.append((self.command, self.path))
        match = re.fullmatch(r"/org/base/resolve/(\w+)/([\w.]+)", self.path.partition("?")[0])
        if match is None or not (file := TINY_BASE / match[2]).is_file():
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("X-Repo-Commit", self.main)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content = file.read_bytes()
        self.send_response(200)
        self.send_header("X-Repo-Commit", self.main if match[1] == "main" else match[1])
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


@pytest.fixture
def hub() -> Iterator[str]:
    with local_server(Hub) as address:
        yield address


@pytest.mark.slow
def test_the_commit_of_a_hub_base_is_pinned_for_resuming(hub: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    local = {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "home"), "no_proxy": "127.0.0.1"}
    environment = user_environment() | local
    for name in ("HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN"):
        environment.pop(name, None)

    def train(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "app.train", *words],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    words = ["model.path=org/base", f"data.datasets={ROOT}/data_modules/samples/lists.json"]
    words += ["logger=csv", "evaluation.max_rows=2", "trainer.checkpoint.every_steps=2"]
    words += ["resume=auto", f"output.dir={folder}"]
    printed = train(*words, "trainer.max_steps=2")
    assert "downloading org/base" in printed
    base = json.loads((folder / "manifest.json").read_text())["base"]
    assert (base["path"], base["revision"]) == ("org/base", FIRST)
    assert yaml.safe_load((folder / "config.yaml").read_text())["model"]["revision"] == FIRST
    assert FIRST in (folder / "adapter" / "README.md").read_text()
    Hub.main = SECOND
    Hub.requests.clear()
    printed = train(*words, "trainer.max_steps=4", "resume_allow=[epochs]")
    assert json.loads((folder / "manifest.json").read_text())["base"]["revision"] == FIRST
    assert "step 4/4" in printed
    assert not any(f"/{SECOND}/" in path or "/main/" in path for _, path in Hub.requests)
    assert os.path.isdir(tmp_path / "home" / "hub" / "models--org--base" / "snapshots" / FIRST)
