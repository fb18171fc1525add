"""The tokens of a conversation: the same in training, in chat, in the server, and as others load
the folder.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from app.evaluation.conversation import (
    SAMPLES,
    ConversationConfig,
    Responder,
    check_served_tokens,
)
from app.serving.address import ServeConfig
from app.serving.application import build_app
from data_modules import TEMPLATE_NAMES, ChatTemplate, Conversation, Origin, Turn
from data_modules.template.named_templates import _NEEDED
from tests.tiny import TINY_BASE

EVERY_DAY = ("chatml", "t5")


def exported(name: str, folder: Path, **how: Any) -> tuple[ChatTemplate, Any]:
    """A template of training, and the tokenizer that it leaves, as others load it."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_BASE)
    tokenizer.chat_template = None
    tokenizer.add_tokens(list(_NEEDED[name]), special_tokens=True)
    template = ChatTemplate.resolve(tokenizer, name, **how)
    tokenizer.save_pretrained(folder)
    return template, AutoTokenizer.from_pretrained(folder)


class Recording(Responder):
    """Keeps the tokens that the model would read, and answers nothing."""

    def _generate(
        self, ids: list[int], limit: int, config: Any, seed: Any, generated: Any, _: Any
    ) -> None:
        self.read = ids
        generated.put(None)


def ask_server(app: Any, messages: list[dict[str, str]]) -> None:
    """Send one request to the application itself, without a socket."""
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
    """Compare what the server has the model read with training's prompts; returns how many."""
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


def check_template(name: str, folder: Path) -> None:
    template, tokenizer = exported(name, folder, is_encoder_decoder=name == "t5")
    assert check_served_tokens(template, tokenizer) == []
    assert check_server(template, tokenizer) >= 1


@pytest.mark.parametrize("name", EVERY_DAY)
def test_training_chat_and_export_agree(name: str, tmp_path: Path) -> None:
    check_template(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(TEMPLATE_NAMES) - set(EVERY_DAY)))
def test_every_template_by_name_agrees(name: str, tmp_path: Path) -> None:
    check_template(name, tmp_path)


def test_a_tokenizer_that_lost_its_template_is_named(tmp_path: Path) -> None:
    template, tokenizer = exported("plain", tmp_path)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    problems = check_served_tokens(template, tokenizer)
    assert len(problems) == 3 and all("the exported tokenizer renders" in one for one in problems)
