"""What the hub refuses of a data set is told apart, against a server that speaks as it does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.local_server import Handler, local_server

ANSWERS = {
    "org/none": (401, "RepoNotFound"),
    "org/gone": (404, ""),
    "org/gated": (403, "GatedRepo"),
    "org/private": (401, ""),
    "org/forbidden": (403, ""),
    "org/tagged": (404, "RevisionNotFound"),
}
READ = """
import json, sys
from data_modules.messages import DataError
from data_modules.source import read_chunks
said = {}
for name in sys.argv[1:]:
    try:
        list(read_chunks(name, revision="v9"))
    except DataError as error:
        said[name] = str(error)
print(json.dumps(said))
"""


class Hub(Handler):
    """A gated data set lists what it holds, as the hub's do; its files it keeps."""

    def do_GET(self) -> None:
        name = "/".join(self.path.split("?")[0].split("/")[3:5])
        status, code = ANSWERS.get(name, (404, "EntryNotFound"))
        if code == "GatedRepo" and "/revision/" in self.path:
            self._send(200, "", {"id": name, "sha": "a" * 40, "siblings": []})
        else:
            self._send(status, code, {})

    def do_HEAD(self) -> None:
        self._send(404, "EntryNotFound", {})

    def _send(self, status: int, code: str, body: object) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(text)


@pytest.fixture
def hub() -> Iterator[str]:
    with local_server(Hub) as address:
        yield address


@pytest.mark.slow
@pytest.mark.parametrize("token", ["", "hf_not_a_token"])
def test_refusals_are_told_apart(token: str, hub: str, tmp_path: Path) -> None:
    """In a process of its own: the hub's library reads its address when it is imported."""
    place = {
        "HF_ENDPOINT": hub,
        "HF_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "0",
        "HF_TOKEN": token,
        "no_proxy": "127.0.0.1",
    }
    read = subprocess.run(
        [sys.executable, "-c", READ, *ANSWERS],
        env={**os.environ, **place},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert read.returncode == 0, read.stderr
    said = json.loads(read.stdout)
    assert all(said[name].startswith(f"{name}: ") for name in ANSWERS), said
    hidden = "your token may not see it" if token else "if it is private, type hf auth login"
    expected = {
        "org/none": ("no such data set on the hub (HTTP 401)", hidden),
        "org/gone": ("no such data set on the hub (HTTP 404)", hidden),
        "org/gated": ("gated: its owner must grant you access", f"{hub}/datasets/org/gated"),
        "org/private": ("(HTTP 401)", "refuses your token" if token else "requires a token"),
        "org/forbidden": ("(HTTP 403)", "use one with read access"),
        "org/tagged": ("has no revision v9", "leave revision out"),
    }
    for name, words in expected.items():
        assert all(word in said[name] for word in words), said[name]
    assert ("hf auth login" in said["org/gated"]) == (not token)
    assert "not_a_token" not in read.stdout
