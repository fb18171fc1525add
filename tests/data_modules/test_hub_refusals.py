"""The reasons for which the hub refuses a data set are distinguished, on a fake hub server."""

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
from common.errors import DataError
from data_modules.source import read_chunks
messages = {}
for name in sys.argv[1:]:
    try:
        list(read_chunks(name, revision="v9"))
    except DataError as error:
        messages[name] = str(error)
print(json.dumps(messages))
"""


class Hub(Handler):
    """Serves a gated data set, which lists its files but refuses to send them, as the hub does."""

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
def test_refusals_are_distinguished(token: str, hub: str, tmp_path: Path) -> None:
    """Runs in a subprocess, because the hub's library reads its address when it is imported."""
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
    messages = json.loads(read.stdout)
    assert all(messages[name].startswith(f"{name}: ") for name in ANSWERS), messages
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
        assert all(word in messages[name] for word in words), messages[name]
    assert ("hf auth login" in messages["org/gated"]) == (not token)
    assert "not_a_token" not in read.stdout
