"""The commit of a hub base is pinned; tested with a local server of the hub's protocol."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import yaml  # type: ignore[import-untyped]
from huggingface_hub import constants

from tests.local_server import Handler, local_server
from tests.tiny import TINY_BASE, train_into

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
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The cache of the hub's library, which asks the local server."""
    with local_server(Hub) as address:
        for name, value in (("HF_ENDPOINT", address), ("HF_HOME", str(tmp_path))):
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        for name in ("HF_HUB_CACHE", "HF_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        url = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield tmp_path / "hub"


@pytest.mark.slow
def test_the_commit_of_a_hub_base_is_pinned_for_resuming(
    cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    words = ("model.path=org/base", "trainer.checkpoint.every_steps=2", "resume=auto")
    train_into(run, *words, "trainer.max_steps=2")
    assert "downloading org/base" in "".join(capfd.readouterr())
    base = json.loads((run / "manifest.json").read_text())["base"]
    assert (base["path"], base["revision"]) == ("org/base", FIRST)
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["revision"] == FIRST
    assert FIRST in (run / "adapter" / "README.md").read_text()
    Hub.main = SECOND
    Hub.requests.clear()
    train_into(run, *words, "trainer.max_steps=4", "resume_allow=[epochs]")
    assert json.loads((run / "manifest.json").read_text())["base"]["revision"] == FIRST
    assert "step 4/4" in "".join(capfd.readouterr())
    assert not any(f"/{SECOND}/" in path or "/main/" in path for _, path in Hub.requests)
    assert (cache / "models--org--base" / "snapshots" / FIRST).is_dir()
