"""Parsing of chat completion requests; errors name the field."""

from __future__ import annotations

import re
from typing import Any

import pytest

from app.evaluation.conversation import ConversationConfig
from app.serving.api import RequestError, parse_chat_request, parse_text_request
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
    ({"model": ""}, "model", "expected a name; this server has the model m"),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "template of training"),
    ({"n": True}, "n", "gets one answer"),
    ({"temprature": 1}, "temprature", "did you mean temperature"),
    ({"temperature": 3}, "temperature", "from 0 to 2"),
    ({"temperature": True}, "temperature", "not a number"),
    ({"metadata": "x"}, "metadata", "not an object"),
    ({"tool_choice": "required"}, "tool_choice", "tool calls are not parsed"),
    ({"seed": 1.5}, "seed", "whole"),
    ({"max_tokens": 10**400}, "max_tokens", "from 1"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "only one of them"),
    ({"stop": ["a"] * 5}, "stop", "at most 4"),
    ({"stop": "x" * 257}, "stop", "at most 256"),
    ({"stop": [1]}, "stop", "a list of strings"),
    ({"stop": ["ok", "\ud83d"]}, "stop", "surrogate"),
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
    """With what clients send besides: none of it changes an answer here."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    earlier = message("assistant", "yes", refusal=None, tool_calls=None, annotations=[])
    asked = (message("user", "hi", name="Ada"), earlier, message("user", parts))
    found = parse(
        model=None,
        messages=[message("developer", "Be brief.", name="ops"), *asked],
        max_completion_tokens=7,
        temperature=0.5,
        top_p=1,
        seed=-1,
        stop=["", "x"],
        n=1,
        tools=[],
        tool_choice="auto",
        logprobs=False,
        stream=True,
        stream_options={"include_usage": True},
        response_format={"type": "text"},
        presence_penalty=0.0,
        functions=None,
        parallel_tool_calls=True,
        metadata={"trace": "1"},
        prompt_cache_key="k",
        modalities=["text"],
        user="me",
    )
    turns = (("system", "Be brief."), ("user", "hi"), ("assistant", "yes"), ("user", "ab"))
    assert found.turns == tuple(Turn(*turn) for turn in turns)
    assert found.sampling == ConversationConfig(max_new_tokens=7, temperature=0.5)
    assert (found.seed, found.stop_texts) == (-1, ("x",))
    assert found.is_stream and found.include_usage
    assert parse().sampling == parse(top_p=0, temperature=1).sampling == DEFAULTS
    defaults = ConversationConfig(system="Hello.")
    for own, expected in (([], ["Hello.", "hi"]), ([message("system", "Mine.")], ["Mine.", "hi"])):
        body = {"model": "m", "messages": [*own, *MESSAGES]}
        turns = parse_chat_request(body, "m", defaults).turns
        assert [turn.content for turn in turns] == expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("Once", "Once"), (["Once"], "Once"), ([1, 2], (1, 2)), ([[1, 2]], (1, 2))],
)
def test_a_prompt_is_one_text_or_its_tokens(prompt: Any, expected: Any) -> None:
    body = {"prompt": prompt, "max_tokens": 3, "echo": False, "best_of": 1, "suffix": None}
    found = parse_text_request(body, "m", ConversationConfig(system="Hello."))
    assert (found.text, found.turns, found.sampling.max_new_tokens) == (expected, (), 3)


@pytest.mark.parametrize("prompt", [None, "", [], [[]], [True], [1, "a"], {}, ["a", "b"], "\ud83d"])
def test_other_prompts_are_refused(prompt: Any) -> None:
    why = "expected a text|2 prompts; a request gets one answer|surrogate"
    with pytest.raises(RequestError, match=why) as refused:
        parse_text_request({"prompt": prompt}, "m", DEFAULTS)
    assert refused.value.param == "prompt"
