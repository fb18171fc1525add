"""Slow, stalled, wrong or endless servers time out; errors name the address but no secret."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from common.errors import ENVIRONMENT_ERROR, DataError, RemoteError, exit_code
from data_modules.source import ReadLimits, fingerprint, read_chunks
from tests.processes import LONGEST

pytestmark = pytest.mark.slow

ROW = b'{"a": 1}\n'
OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"
SIZED, UNSIZED = b"Content-Length: 9000000", b"Connection: close"
Serve = Callable[[socket.socket, bytes], None]


@contextmanager
def serving(serve: Serve) -> Iterator[str]:
    """Serve a local port; `serve(connection, request)` answers each connection."""
    listening = socket.create_server(("127.0.0.1", 0))

    def answer(connection: socket.socket) -> None:
        with connection:
            try:
                while request := connection.recv(65536):
                    serve(connection, request)
            except OSError:
                pass  # the other side has left

    def accept() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://user:word@127.0.0.1:{listening.getsockname()[1]}/d.jsonl?token=secret"
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()


def never(connection: socket.socket, request: bytes) -> None:
    """Receive the request and never respond."""
    time.sleep(20)


def sends(piece: bytes, header: bytes, seconds: float) -> Serve:
    """Return what sends a piece again and again, every so many seconds."""

    def serve(connection: socket.socket, request: bytes) -> None:
        connection.sendall(OK + header + b"\r\n\r\n")
        while not request.startswith(b"HEAD"):
            connection.sendall(piece)
            time.sleep(seconds)
        if header == UNSIZED:
            connection.shutdown(socket.SHUT_RDWR)

    return serve


def break_off(connection: socket.socket, request: bytes) -> None:
    connection.sendall(OK + b"Content-Length: 9000\r\n\r\n")
    if not request.startswith(b"HEAD"):
        connection.sendall(ROW * 10)
        connection.shutdown(socket.SHUT_RDWR)


def redirect(connection: socket.socket, request: bytes) -> None:
    connection.sendall(
        b"HTTP/1.1 302 Found\r\nLocation: /again/d.jsonl\r\nContent-Length: 0\r\n\r\n"
    )


LIMITS = ReadLimits(
    remote_seconds=1.5, remote_bytes_per_second=1 << 20, remote_bytes=3 << 20, rows=10**9
)
# A busy machine may be late with its first answer.
TOO_SLOW = (
    r"received .* bytes in .* seconds; data.limits.remote_bytes_per_second is 1,048,576; "
    r"try again later, download|"
    r"no answer within 1.5 seconds \(data.limits.remote_seconds\); try again later"
)
CASES: dict[str, tuple[Serve, str]] = {
    "never answers": (never, "data.limits.remote_seconds|cannot be reached"),
    "stalls": (sends(b"", SIZED, 20), "cannot be read"),
    "drips": (sends(b" ", SIZED, 0.05), TOO_SLOW),
    "drips unsized": (sends(b" ", UNSIZED, 0.05), TOO_SLOW),
    "endless": (
        sends(ROW * 10_000, UNSIZED, 0),
        "sends more than 3,145,728 bytes; data.limits.remote_bytes is 3,145,728",
    ),
    "breaks off": (break_off, "cannot be read"),
    "redirects": (redirect, "cannot be read"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_misbehaving_server_is_given_up(name: str) -> None:
    serve, pattern = CASES[name]
    with serving(serve) as address:
        started = time.monotonic()
        with pytest.raises(RemoteError, match=pattern) as caught:
            for chunk in read_chunks(address, limits=LIMITS):
                chunk.count()
        if serve == never:
            with pytest.raises(RemoteError):
                fingerprint(address, limits=LIMITS)
        assert time.monotonic() - started < 15
    assert exit_code(caught.value) == ENVIRONMENT_ERROR
    message = str(caught.value)
    assert "/d.jsonl: " in message and "127.0.0.1" in message
    assert "word" not in message and "secret" not in message


@pytest.mark.parametrize(
    ("status", "said", "is_of_environment"),
    [
        ("404 Not Found", "no such file", False),
        ("403 Forbidden", "cannot be read: the server returned 403 Forbidden", False),
        ("500 Oh No", "cannot be read: the server returned 500 Oh No", True),
    ],
)
def test_the_status_of_a_server_is_reported(
    status: str, said: str, is_of_environment: bool
) -> None:
    def refuse(connection: socket.socket, request: bytes) -> None:
        connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode())

    with serving(refuse) as address:
        for read in (fingerprint, lambda path: list(read_chunks(path))):
            with pytest.raises(DataError) as caught:
                read(address)
            bare = address.replace("user:word@", "").removesuffix("?token=secret")
            assert caught.value.problems == [f"{bare}: {said}"]
            assert isinstance(caught.value, RemoteError) == is_of_environment


@pytest.mark.parametrize("takes_ranges", [True, False])
def test_a_working_server_is_read_to_the_end(takes_ranges: bool) -> None:
    body = b"".join(b'{"a": %d}\n' % number for number in range(100_000))

    def serve(connection: socket.socket, request: bytes) -> None:
        head, part = OK, body
        if takes_ranges and b"Range: bytes=" in request:
            first, last = request.split(b"Range: bytes=")[1].split(b"\r\n")[0].split(b"-")
            part = body[int(first) : int(last) + 1]
            head = b"HTTP/1.1 206 Partial Content\r\n" + b"Content-Range: bytes %d-%d/%d\r\n" % (
                int(first),
                int(first) + len(part) - 1,
                len(body),
            )
        ranges = b"Accept-Ranges: bytes\r\n" if takes_ranges else b"Accept-Ranges: none\r\n"
        connection.sendall(head + ranges + b"Content-Length: %d\r\n\r\n" % len(part))
        if not request.startswith(b"HEAD"):
            connection.sendall(part)

    with serving(serve) as address:
        rows = [row for chunk in read_chunks(address) for row in chunk.rows()]
    assert [row.values["a"] for row in rows] == list(range(100_000))  # type: ignore[union-attr]


SHA = b"a" * 40
HUB_FILE = b'{"type": "file", "oid": "%s", "size": 9000, "path": "train.jsonl"}' % SHA
HUB_SET = b'{"id": "%s", "sha": "%s", "siblings": [{"rfilename": "train.jsonl"}]}'
REFUSED = {
    "org/none": "401 RepoNotFound",
    "org/gone": "404 ",
    "org/gated": "403 GatedRepo",
    "org/private": "401 ",
    "org/forbidden": "403 ",
    "org/tagged": "404 RevisionNotFound",
}
"""data set -> status and code with which it is refused"""
HIDDEN = {"": "if it is private, type hf auth login", "hf_x": "your token may not see it"}
"""token -> what is said of a data set that the hub does not show"""
READ_HUB = """
import json, os, sys
from common.errors import DataError, exit_code
from data_modules.source import ReadLimits, read_chunks
limits = ReadLimits(remote_seconds=1.5, remote_bytes_per_second=1 << 20)
for name, how, token in json.loads(sys.argv[1]):
    os.environ["HF_TOKEN"] = token
    try:
        chunks = read_chunks(name, revision="v9", streaming=how == "streaming", limits=limits)
        said = [0, sum(chunk.count() for chunk in chunks)]
    except DataError as error:
        said = [exit_code(error), str(error)]
    print(json.dumps([name, how, token, *said]), flush=True)
"""


def hub(connection: socket.socket, request: bytes) -> None:
    """Answer as a hub whose data sets are refused, or whose files come slowly, by their names."""
    path = request.split(b" ")[1].split(b"?")[0]
    name = b"/".join(path.removeprefix(b"/api").split(b"/")[2:4]).decode()
    if b"train.jsonl" in path and name not in REFUSED:
        head = OK + b'ETag: "%s"\r\nX-Repo-Commit: %s\r\n' % (SHA, SHA)
        # The file is also offered by the protocol of `hf_xet`, which nothing here serves.
        head += b"X-Xet-Hash: %s\r\nX-Xet-Refresh-Route: /none\r\n" % (SHA + SHA[:24])
        connection.sendall(head + b"Content-Length: 9000\r\n\r\n")
        if request.startswith(b"HEAD"):
            return
        connection.sendall(ROW * (1000 if name == "org/sound" else 1))
        while name == "org/drips":
            connection.sendall(b" ")
            time.sleep(0.05)
        time.sleep(60 if name == "org/stalls" else 0)
        return
    status, code = REFUSED.get(name, "404 EntryNotFound").split(" ")
    body = b""
    # A gated data set lists its files, but refuses to send them.
    if path.startswith(b"/api/") and (name not in REFUSED or b"/revision/" in path):
        if name not in REFUSED or code == "GatedRepo":
            status, code, body = "200", "", HUB_SET % (name.encode(), SHA)
        if b"/tree/" in path:
            body = b"[]" if path.endswith(b"/data") else b"[" + HUB_FILE + b"]"
    error = f"X-Error-Code: {code}\r\n" if code else ""
    head = f"HTTP/1.1 {status} Said\r\n{error}Content-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)


@pytest.fixture(scope="module")
def said_of_hub(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], list[Any]]:
    """Read each data set, in one process: the hub's library reads its address when imported."""
    asked = [(name, "downloading", token) for name in REFUSED for token in HIDDEN]
    asked += [("org/sound", how, "") for how in ("streaming", "downloading")]
    asked += [("org/stalls", "streaming", ""), ("org/drips", "downloading", "")]
    with serving(hub) as address:
        place = {
            "HF_ENDPOINT": f"http://127.0.0.1:{urlsplit(address).port}",
            "HF_HOME": str(tmp_path_factory.mktemp("hub")),
            "HF_HUB_DOWNLOAD_TIMEOUT": "2",
            "HF_HUB_OFFLINE": "0",
            "no_proxy": "127.0.0.1",
        }
        read = subprocess.run(
            [sys.executable, "-c", READ_HUB, json.dumps(asked)],
            env={**os.environ, **place},
            capture_output=True,
            text=True,
            timeout=LONGEST,
        )
    assert read.returncode == 0, read.stderr
    said = map(json.loads, read.stdout.splitlines())
    return {(name, how, token): [*rest] for name, how, token, *rest in said}


def test_a_slow_hub_is_given_up(said_of_hub: dict[tuple[str, ...], list[Any]]) -> None:
    """A hub that responds at once, but sends a file slowly."""
    for how in ("streaming", "downloading"):
        assert said_of_hub["org/sound", how, ""] == [0, 1000]
    stalled = said_of_hub["org/stalls", "streaming", ""]
    dripped = said_of_hub["org/drips", "downloading", ""]
    for (code, message), expected in ((stalled, "no answer within"), (dripped, "received ")):
        assert code == ENVIRONMENT_ERROR
        assert "train.jsonl: " in message and expected in message


@pytest.mark.parametrize("token", HIDDEN)
def test_refusals_are_distinguished(
    token: str, said_of_hub: dict[tuple[str, ...], list[Any]]
) -> None:
    messages = {name: said_of_hub[name, "downloading", token][1] for name in REFUSED}
    assert all(messages[name].startswith(f"{name}: ") for name in REFUSED), messages
    expected = {
        "org/none": ("no such data set on the hub (HTTP 401)", HIDDEN[token]),
        "org/gone": ("no such data set on the hub (HTTP 404)", HIDDEN[token]),
        "org/gated": ("gated: its owner must grant you access", "/datasets/org/gated"),
        "org/private": ("(HTTP 401)", "refuses your token" if token else "requires a token"),
        "org/forbidden": ("(HTTP 403)", "use one with read access"),
        "org/tagged": ("has no revision v9", "leave revision out"),
    }
    for name, words in expected.items():
        assert all(word in messages[name] for word in words), messages[name]
        assert "hf_x" not in messages[name]
    assert ("hf auth login" in messages["org/gated"]) == (not token)


READ_XET = """
import sys, time
from data_modules.source.hub import limit_hub
limit_hub(0.5, 1 << 20)
import hf_xet
info = hf_xet.PyXetDownloadInfo(destination_path=sys.argv[2], hash="a" * 64, file_size=1000)
access = ("token", int(time.time()) + 3600)
try:
    hf_xet.download_files([info], endpoint=sys.argv[1], token_info=access, token_refresher=None,
                          progress_updater=None)
except ConnectionError:
    sys.exit(3)
"""


def test_a_silent_storage_of_the_hub_is_given_up(tmp_path: Path) -> None:
    pytest.importorskip("hf_xet")
    with serving(lambda connection, request: time.sleep(60)) as address:
        endpoint = f"http://127.0.0.1:{urlsplit(address).port}"
        words = [sys.executable, "-c", READ_XET, endpoint, str(tmp_path / "file")]
        read = subprocess.run(words, capture_output=True, text=True, timeout=LONGEST)
    assert read.returncode == ENVIRONMENT_ERROR, read.stderr
