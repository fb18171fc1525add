"""A server in a thread of this process, and a model that answers as it is told."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from app.evaluation.conversation import ConversationConfig, Reply
from app.serving.address import ServeConfig, address_of, bind
from app.serving.application import build_app
from app.serving.server import build_server
from data_modules import Turn

NAME = "tiny"
ASKED = {"model": NAME, "messages": [{"role": "user", "content": "What is 2 + 2?"}]}


class Told:
    """Answers with given pieces; before each of them `before` is called."""

    def __init__(self, *pieces: str, before: Callable[[], object] = lambda: None) -> None:
        self.pieces, self.before = pieces, before
        self.control_texts = ("<|im_end|>",)
        self.num_given = 0
        self.num_turns: list[int] = []
        self.has_ended = threading.Event()

    def prompt_ids(self, turns: Sequence[Turn]) -> list[int]:
        self.num_turns.append(len(turns))
        return [1] * len(turns)

    def answer(self, reply: Reply, how: ConversationConfig, **_: Any) -> Generator[str, None, None]:
        try:
            for piece in self.pieces:
                self.before()
                reply.num_tokens += 1
                self.num_given += 1
                yield piece
            reply.is_finished = True
        finally:
            self.has_ended.set()


@contextmanager
def serving(responder: Any, *, key: str | None = None, **limits: Any) -> Iterator[str]:
    """Serve at a free port; gives the address, and the server has ended after it."""
    config = ServeConfig(port=0, **limits)
    listener = bind(config)
    defaults = ConversationConfig(max_new_tokens=16)
    server = build_server(build_app(responder, config, defaults, NAME, key))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    address = address_of(listener)
    thread.start()
    try:
        yield address
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def ask(
    address: str, body: Any = None, path: str = "/v1/chat/completions", **headers: str
) -> tuple[int, Any, Any]:
    """Send one request; returns its status, what its JSON holds (else its text), its headers."""
    typed = {name.replace("_", "-"): value for name, value in headers.items()}
    if body is not None:
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        typed = {"content-type": "application/json", **typed}
    request = urllib.request.Request(address + path, body, typed)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            text, status, found = answer.read().decode(), answer.status, answer.headers
    except urllib.error.HTTPError as error:
        text, status, found = error.read().decode(), error.code, error.headers
    is_json = str(found["content-type"]).startswith("application/json")
    return status, json.loads(text) if is_json else text, found


def wait_for(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait until a condition holds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds
        time.sleep(0.01)
