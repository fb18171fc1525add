"""Requests for an answer: what is read of them, and what is refused by the name of its field."""

from __future__ import annotations

import re
from typing import Any

import pytest

from app.evaluation.conversation import ConversationConfig
from app.serving.requests import RequestError, check_contents, read_chat, read_json
from data_modules import Turn

ASK = [{"role": "user", "content": "hi"}]
DEFAULTS = ConversationConfig(max_new_tokens=20)


def read(**fields: Any) -> Any:
    return read_chat({"model": "m", "messages": ASK, **fields}, "m", DEFAULTS)


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/secret"}}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "a list"),
    ({"messages": "hi"}, "messages", "a list"),
    ({"messages": ["hi"]}, "messages[0]", "not an object"),
    ({"messages": ASK * 513}, "messages", "513"),
    ({"messages": [said("robot", "hi")]}, "messages[0].role", "robot is none of system"),
    ({"messages": [*ASK, said("assistant", "yes")]}, "messages", "nothing is asked"),
    ({"messages": [said("user", None)]}, "messages[0].content", "null"),
    ({"messages": [said("user", [])]}, "messages[0].content", "not a text"),
    ({"messages": [said("user", "\ud83d")]}, "messages[0].content", "surrogate"),
    ({"messages": [said("user", [IMAGE])]}, "messages[0].content[0]", "image_url.*no URL"),
    (
        {"messages": [said("user", "x", tool_calls=[{}]), *ASK]},
        "messages[0].tool_calls",
        "not supp",
    ),
    ({"model": None}, "model", "this server has m"),
    ({"model": ""}, "model", "a name; this server has m"),
    ({"tools": [{"type": "function"}]}, "tools", "reads no calls"),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "the one of training"),
    ({"chat_template_kwargs": {}}, "chat_template_kwargs", "the one of training"),
    ({"response_format": {"type": "json_object"}}, "response_format", "text"),
    ({"n": 2}, "n", "one answer"),
    ({"n": True}, "n", "one answer"),
    ({"temprature": 1}, "temprature", "did you mean temperature"),
    ({"temperature": 3}, "temperature", "from 0 to 2"),
    ({"temperature": "1"}, "temperature", "not a number"),
    ({"temperature": True}, "temperature", "not a number"),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"seed": 1.5}, "seed", "whole"),
    ({"max_tokens": 0}, "max_tokens", "from 1"),
    ({"max_tokens": 10**400}, "max_tokens", "from 1"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "keep one"),
    ({"stop": ["a"] * 5}, "stop", "at most 4"),
    ({"stop": ""}, "stop", "1 to 256"),
    ({"stop": [1]}, "stop", "a list of texts"),
    ({"stream": "yes"}, "stream", "not true or false"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
    ({"\ud83d" * 200: 1}, "ud83d", "not supported"),
]


@pytest.mark.parametrize(("fields", "param", "why"), REFUSED)
def test_a_request_is_refused_by_its_field(fields: dict[str, Any], param: str, why: str) -> None:
    with pytest.raises(RequestError) as refused:
        read(**fields)
    found = refused.value.body["error"]
    assert param in found["param"] and re.search(why, found["message"])
    assert len(found["message"]) < 300 and found["type"] == "invalid_request_error"


def test_what_a_request_says_wins_over_the_defaults() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    back = said("assistant", "yes", refusal=None, tool_calls=None, annotations=[])
    found = read(
        messages=[said("system", "Be brief."), *ASK, back, said("user", parts)],
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
    assert found.how == ConversationConfig(max_new_tokens=7, temperature=0.5)
    assert (found.seed, found.stop_texts, found.is_stream, found.has_usage) == (
        -1,
        ("x",),
        True,
        True,
    )
    assert read().how == DEFAULTS


def test_the_default_system_prompt_gives_way_to_one_of_the_request() -> None:
    defaults = ConversationConfig(system="Hello.")
    body = {"model": "m", "messages": ASK}
    assert read_chat(body, "m", defaults).turns[0] == Turn("system", "Hello.")
    body = {"model": "m", "messages": [said("system", "Mine."), *ASK]}
    assert [turn.content for turn in read_chat(body, "m", defaults).turns] == ["Mine.", "hi"]


@pytest.mark.parametrize("body", [b"", b"{no", b"\xff", b"[" * 100_000, b"NaN", b"1" * 5000])
def test_a_body_that_is_not_json_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError, match=r"not JSON|not an object"):
        read_chat(read_json(body), "m", DEFAULTS)


def test_text_cannot_act_as_a_control_token() -> None:
    turns = (Turn("user", "ends <|im_end|> here"),)
    with pytest.raises(RequestError, match=r"control token <\|im_end\|>"):
        check_contents(turns, ("<|im_end|>",))
    check_contents(turns, ("</s>",))
