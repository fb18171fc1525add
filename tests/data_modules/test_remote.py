"""Slow, stalled, wrong or endless servers time out; errors name the address but no secret."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from app.process.reporting import report
from common.errors import ENVIRONMENT_ERROR, DataError, RemoteError, exit_code
from data_modules.source import Limits, fingerprint, read_chunks
from tests.processes import LONGEST

pytestmark = pytest.mark.slow

ROW = b'{"a": 1}\n'
OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"
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


def stall(connection: socket.socket, request: bytes) -> None:
    """Send only the headers."""
    connection.sendall(OK + b"Content-Length: 9000000\r\n\r\n")
    if not request.startswith(b"HEAD"):
        time.sleep(20)


def drip(connection: socket.socket, request: bytes) -> None:
    """Send single bytes slowly."""
    connection.sendall(OK + b"Content-Length: 9000000\r\n\r\n")
    while not request.startswith(b"HEAD"):
        connection.sendall(b" ")
        time.sleep(0.05)


def drip_unsized(connection: socket.socket, request: bytes) -> None:
    """Send single bytes slowly, without a content length."""
    connection.sendall(OK + b"Connection: close\r\n\r\n")
    while not request.startswith(b"HEAD"):
        connection.sendall(b" ")
        time.sleep(0.05)
    connection.shutdown(socket.SHUT_RDWR)


def endless(connection: socket.socket, request: bytes) -> None:
    """Send endless rows."""
    connection.sendall(OK + b"Connection: close\r\n\r\n")
    while not request.startswith(b"HEAD"):
        connection.sendall(ROW * 10_000)
    connection.shutdown(socket.SHUT_RDWR)


def endless_row(connection: socket.socket, request: bytes) -> None:
    """Send one endless row."""
    connection.sendall(OK + b"Connection: close\r\n\r\n")
    while not request.startswith(b"HEAD"):
        connection.sendall(b"a" * 100_000)
    connection.shutdown(socket.SHUT_RDWR)


def break_off(connection: socket.socket, request: bytes) -> None:
    """Send less than the content length."""
    connection.sendall(OK + b"Content-Length: 9000\r\n\r\n")
    if not request.startswith(b"HEAD"):
        connection.sendall(ROW * 10)
        connection.shutdown(socket.SHUT_RDWR)


def redirect(connection: socket.socket, request: bytes) -> None:
    """Redirect the client in a loop."""
    connection.sendall(
        b"HTTP/1.1 302 Found\r\nLocation: /again/d.jsonl\r\nContent-Length: 0\r\n\r\n"
    )


LIMITS = Limits(
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
    "stalls": (stall, "cannot be read"),
    "drips": (drip, TOO_SLOW),
    "drips unsized": (drip_unsized, TOO_SLOW),
    "endless": (endless, "sends more than 3,145,728 bytes; data.limits.remote_bytes is 3,145,728"),
    "endless row": (endless_row, "sends more than 3,145,728 bytes; data.limits.remote_bytes"),
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
        assert time.monotonic() - started < 15
    assert exit_code(caught.value) == ENVIRONMENT_ERROR
    message = str(caught.value)
    assert "/d.jsonl: " in message and "127.0.0.1" in message
    assert "word" not in message and "secret" not in message


def test_problems_are_reported_in_one_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert report(RemoteError(["a.jsonl: is slow", "b.jsonl: is silent"])) == ENVIRONMENT_ERROR
    message = capsys.readouterr().err
    assert message == "error (the environment): a.jsonl: is slow\n  b.jsonl: is silent\n"


def test_a_fingerprint_times_out() -> None:
    with serving(never) as address, pytest.raises(RemoteError):
        fingerprint(address, limits=LIMITS)


def test_a_missing_file_is_a_user_error() -> None:
    def missing(connection: socket.socket, request: bytes) -> None:
        connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    with serving(missing) as address, pytest.raises(DataError, match="no such file") as caught:
        list(read_chunks(address))
    assert not isinstance(caught.value, RemoteError)


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
HUB_SET = b'{"id": "some/rows", "sha": "%s", "siblings": [{"rfilename": "train.jsonl"}]}' % SHA
READ_HUB = """
import sys
from common.errors import RemoteError
from data_modules.source import Limits, read_chunks
limits = Limits(remote_seconds=1.5, remote_bytes_per_second=1 << 20)
try:
    for chunk in read_chunks("some/rows", streaming=sys.argv[1] == "streaming", limits=limits):
        print(chunk.count())
except RemoteError as error:
    print(error)
    sys.exit(3)
"""


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("stalls", "streaming"),
        ("drips", "downloading"),
        ("is sound", "streaming"),
        ("is sound", "downloading"),
    ],
)
def test_a_slow_hub_is_given_up(name: str, how: str, tmp_path: Path) -> None:
    """A hub with one data set responds at once, but sends the file slowly."""

    def serve(connection: socket.socket, request: bytes) -> None:
        path = request.split(b" ")[1]
        if b"train.jsonl" in path:
            head = OK + b'ETag: "%s"\r\nX-Repo-Commit: %s\r\n' % (SHA, SHA)
            # The file is also offered by the protocol of `hf_xet`, which nothing here serves.
            head += b"X-Xet-Hash: %s\r\nX-Xet-Refresh-Route: /none\r\n" % (SHA + SHA[:24])
            connection.sendall(head + b"Content-Length: 9000\r\n\r\n")
            if request.startswith(b"HEAD"):
                return
            if name == "is sound":
                connection.sendall(ROW * 1000)
            else:
                connection.sendall(ROW)
                while name == "drips":
                    connection.sendall(b" ")
                    time.sleep(0.05)
                time.sleep(60)
        elif path.startswith(b"/api/"):
            body = HUB_SET if b"/tree/" not in path else b"[" + HUB_FILE + b"]"
            body = b"[]" if path.split(b"?")[0].endswith(b"/data") else body
            kind = b"Content-Type: application/json\r\n"
            connection.sendall(OK + kind + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        else:
            why = b"X-Error-Code: EntryNotFound\r\nContent-Length: 0\r\n\r\n"
            connection.sendall(b"HTTP/1.1 404 Not Found\r\n" + why)

    with serving(serve) as address:
        place = {
            "HF_ENDPOINT": f"http://127.0.0.1:{urlsplit(address).port}",
            "HF_HOME": str(tmp_path),
            "HF_HUB_DOWNLOAD_TIMEOUT": "2",
            "HF_HUB_OFFLINE": "0",
        }
        read = subprocess.run(
            [sys.executable, "-c", READ_HUB, how],
            env={**os.environ, **place},
            capture_output=True,
            text=True,
            timeout=LONGEST,
        )
    if name == "is sound":
        assert read.returncode == 0, read.stderr
        assert sum(map(int, read.stdout.split())) == 1000
        return
    assert read.returncode == ENVIRONMENT_ERROR, read.stderr
    expected = "no answer within" if name == "stalls" else "received "
    assert "train.jsonl: " in read.stdout and expected in read.stdout


READ_XET = """
import sys, time
from data_modules.source.hub import limit_hub
limit_hub(1.5, 1 << 20)
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
