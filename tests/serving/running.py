"""A server in a thread of this process, and a model that gives a scripted answer."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from app.evaluation.conversation import ConversationConfig, Reply
from app.serving.api import ServeConfig, address_of, open_socket
from app.serving.server import build_app, build_server
from data_modules import Turn

NAME = "tiny"
REQUEST = {"model": NAME, "messages": [{"role": "user", "content": "What is 2 + 2?"}]}


class ScriptedResponder:
    """Answers with the given pieces of text; calls `before` before each of them."""

    def __init__(self, *pieces: str, before: Callable[[], object] = lambda: None) -> None:
        self.pieces, self.before = pieces, before
        self.control_texts = ("<|im_end|>",)
        self.num_generated = 0
        self.num_turns: list[int] = []
        self.continues: list[bool] = []
        self.has_ended = threading.Event()

    def prompt_ids(self, turns: Sequence[Turn]) -> list[int]:
        self.num_turns.append(len(turns))
        return [1] * len(turns)

    def answer(
        self, reply: Reply, config: ConversationConfig, **_: Any
    ) -> Generator[str, None, None]:
        self.continues.append(reply.continues_text)
        try:
            for piece in self.pieces:
                self.before()
                reply.num_tokens += 1
                self.num_generated += 1
                yield piece
            reply.is_finished = True
        finally:
            self.has_ended.set()


@contextmanager
def serving(responder: Any, *, key: str | None = None, **limits: Any) -> Iterator[str]:
    """Serve at a free port and yield the URL; the server is stopped on exit."""
    config = ServeConfig(port=0, **limits)
    listener = open_socket(config)
    defaults = ConversationConfig(max_new_tokens=16)
    server = build_server(build_app(responder, config, defaults, NAME, key))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        yield address_of(listener)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def send(
    url: str, body: Any = None, path: str = "/v1/chat/completions", **headers: str
) -> tuple[int, Any, Any]:
    """Send one request; return status, parsed JSON (or text), and headers of the response."""
    request_headers = {name.replace("_", "-"): value for name, value in headers.items()}
    if body is not None:
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        request_headers = {"content-type": "application/json", **request_headers}
    request = urllib.request.Request(url + path, body, request_headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            text, status, found = response.read().decode(), response.status, response.headers
    except urllib.error.HTTPError as error:
        text, status, found = error.read().decode(), error.code, error.headers
    is_json = str(found["content-type"]).startswith("application/json")
    return status, json.loads(text) if is_json else text, found
