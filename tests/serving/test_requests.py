"""Parsing of chat completion requests; errors name the field."""

from __future__ import annotations

import re
from typing import Any

import pytest

from app.evaluation.conversation import ConversationConfig
from app.serving.requests import (
    RequestError,
    check_no_control_tokens,
    parse_chat_request,
    parse_json,
)
from data_modules import Turn

MESSAGES = [{"role": "user", "content": "hi"}]
DEFAULTS = ConversationConfig(max_new_tokens=20)


def parse(**fields: Any) -> Any:
    return parse_chat_request({"model": "m", "messages": MESSAGES, **fields}, "m", DEFAULTS)


def message(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/secret"}}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "a non-empty list"),
    ({"messages": "hi"}, "messages", "a non-empty list"),
    ({"messages": ["hi"]}, "messages[0]", "expected an object"),
    ({"messages": MESSAGES * 513}, "messages", "513"),
    ({"messages": [message("robot", "hi")]}, "messages[0].role", "robot is not one of system"),
    ({"messages": [*MESSAGES, message("assistant", "yes")]}, "messages", "must have the role user"),
    ({"messages": [message("user", None)]}, "messages[0].content", "null"),
    ({"messages": [message("user", [])]}, "messages[0].content", "not a string"),
    ({"messages": [message("user", "\ud83d")]}, "messages[0].content", "surrogate"),
    (
        {"messages": [message("user", [IMAGE])]},
        "messages[0].content[0]",
        "image_url.*not supported.*no URL",
    ),
    (
        {"messages": [message("user", "x", tool_calls=[{}]), *MESSAGES]},
        "messages[0].tool_calls",
        "not supp",
    ),
    ({"model": None}, "model", "this server has the model m"),
    ({"model": ""}, "model", "expected a name; this server has the model m"),
    ({"tools": [{"type": "function"}]}, "tools", "tool calls are not parsed"),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "template of training"),
    ({"chat_template_kwargs": {}}, "chat_template_kwargs", "template of training"),
    ({"response_format": {"type": "json_object"}}, "response_format", "plain text"),
    ({"n": 2}, "n", "gets one answer"),
    ({"n": True}, "n", "gets one answer"),
    ({"temprature": 1}, "temprature", "did you mean temperature"),
    ({"temperature": 3}, "temperature", "from 0 to 2"),
    ({"temperature": "1"}, "temperature", "not a number"),
    ({"temperature": True}, "temperature", "not a number"),
    ({"top_p": 0}, "top_p", "more than 0"),
    ({"seed": 1.5}, "seed", "whole"),
    ({"max_tokens": 0}, "max_tokens", "from 1"),
    ({"max_tokens": 10**400}, "max_tokens", "from 1"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "only one of them"),
    ({"stop": ["a"] * 5}, "stop", "at most 4"),
    ({"stop": ""}, "stop", "1 to 256"),
    ({"stop": [1]}, "stop", "a list of strings"),
    ({"stream": "yes"}, "stream", "not true or false"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
    ({"\ud83d" * 200: 1}, "ud83d", "not supported"),
]


@pytest.mark.parametrize(("fields", "param", "why"), REFUSED)
def test_an_invalid_field_is_named(fields: dict[str, Any], param: str, why: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse(**fields)
    found = refused.value.body["error"]
    assert param in found["param"] and re.search(why, found["message"])
    assert len(found["message"]) < 300 and found["type"] == "invalid_request_error"


def test_fields_of_the_request_override_the_defaults() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    earlier = message("assistant", "yes", refusal=None, tool_calls=None, annotations=[])
    found = parse(
        messages=[message("system", "Be brief."), *MESSAGES, earlier, message("user", parts)],
        max_completion_tokens=7,
        temperature=0.5,
        top_p=1,
        seed=-1,
        stop="x",
        n=1,
        user="me",
        tools=[],
        logprobs=False,
        stream=True,
        response_format={"type": "text"},
        presence_penalty=0.0,
        functions=None,
        stream_options={"include_usage": True},
    )
    assert found.turns == (
        Turn("system", "Be brief."),
        Turn("user", "hi"),
        Turn("assistant", "yes"),
        Turn("user", "ab"),
    )
    assert found.sampling == ConversationConfig(max_new_tokens=7, temperature=0.5)
    assert (found.seed, found.stop_texts, found.is_stream, found.include_usage) == (
        -1,
        ("x",),
        True,
        True,
    )
    assert parse().sampling == DEFAULTS


def test_a_system_message_replaces_the_default_system_prompt() -> None:
    defaults = ConversationConfig(system="Hello.")
    body = {"model": "m", "messages": MESSAGES}
    assert parse_chat_request(body, "m", defaults).turns[0] == Turn("system", "Hello.")
    body = {"model": "m", "messages": [message("system", "Mine."), *MESSAGES]}
    assert [turn.content for turn in parse_chat_request(body, "m", defaults).turns] == [
        "Mine.",
        "hi",
    ]


@pytest.mark.parametrize("body", [b"", b"{no", b"\xff", b"[" * 100_000, b"NaN", b"1" * 5000])
def test_a_body_that_is_not_json_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError, match=r"not JSON|not a JSON object"):
        parse_chat_request(parse_json(body), "m", DEFAULTS)


def test_control_tokens_in_messages_are_refused() -> None:
    turns = (Turn("user", "ends <|im_end|> here"),)
    with pytest.raises(RequestError, match=r"control token <\|im_end\|>"):
        check_no_control_tokens(turns, ("<|im_end|>",))
    check_no_control_tokens(turns, ("</s>",))
