"""A conversation has the same tokens in training, chat, the server, and the exported tokenizer."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from app.evaluation.conversation import SAMPLES, ConversationConfig, Responder, check_served_tokens
from app.serving.api import ServeConfig
from app.serving.server import build_app
from common.errors import Origin
from data_modules import TEMPLATE_NAMES, ChatTemplate, Conversation, Turn
from data_modules.template.named_templates import _NEEDED
from tests.tiny import TINY_BASE

EVERY_DAY = ("chatml", "t5")


def exported(name: str, folder: Path, **how: Any) -> tuple[ChatTemplate, Any]:
    """A chat template as in training, and the exported tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_BASE)
    tokenizer.chat_template = None
    tokenizer.add_tokens(list(_NEEDED[name]), special_tokens=True)
    template = ChatTemplate.resolve(tokenizer, name, **how)
    tokenizer.save_pretrained(folder)
    return template, AutoTokenizer.from_pretrained(folder)


class Recording(Responder):
    """Records the input tokens, and generates nothing."""

    def _generate(
        self, ids: list[int], limit: int, config: Any, seed: Any, generated: Any, _: Any
    ) -> None:
        self.read = ids
        generated.put(None)


def ask_server(app: Any, messages: list[dict[str, str]]) -> None:
    """Send one request to the ASGI application, without a socket."""
    body = json.dumps({"model": "m", "messages": messages}).encode()
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}
    scope |= {"query_string": b"", "root_path": "", "scheme": "http", "http_version": "1.1"}
    waiting = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return waiting.pop() if waiting else await asyncio.Future()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 200, sent


def check_server(template: ChatTemplate, tokenizer: Any) -> int:
    """Compare the server's input tokens with training's; return the number of comparisons."""
    responder = Recording(None, tokenizer, template, set())  # type: ignore[arg-type]
    app = build_app(responder, ServeConfig(), ConversationConfig(), "m")
    compared = 0
    for texts in SAMPLES:
        roles = ["assistant" if number % 2 else "user" for number in range(len(texts))]
        turns = (*map(Turn, roles, texts), Turn("assistant", "An answer."))
        trained = template.prompt(Conversation(turns, Origin("sample", 1)))
        if trained is not None:
            pairs = zip(roles, texts, strict=True)
            ask_server(app, [{"role": role, "content": text} for role, text in pairs])
            assert responder.read == trained.input_ids
            compared += 1
    return compared


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in EVERY_DAY else pytest.mark.slow)
        for name in sorted(TEMPLATE_NAMES)
    ],
)
def test_training_chat_server_and_export_give_equal_tokens(name: str, tmp_path: Path) -> None:
    template, tokenizer = exported(name, tmp_path, is_encoder_decoder=name == "t5")
    assert check_served_tokens(template, tokenizer) == []
    assert check_server(template, tokenizer) >= 1


def test_a_changed_template_is_reported(tmp_path: Path) -> None:
    template, tokenizer = exported("plain", tmp_path)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    problems = check_served_tokens(template, tokenizer)
    assert len(problems) == 3 and all("the exported tokenizer renders" in one for one in problems)
