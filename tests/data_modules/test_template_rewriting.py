"""Turns that a chat template rejects are rewritten, and no text is lost."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise

import pytest

from common.errors import Origin
from data_modules.template import ChatTemplate
from data_modules.template.named_templates import TEST_CHATS, build_test_chat
from data_modules.template.rendering import LATER_SYSTEM_TURNS, UNSUPPORTED_BY, rewrite_turns
from data_modules.types import Conversation, Encoded, ToolCall, Turn
from tests.data_modules.conftest import build_tokenizer

ALL = tuple(UNSUPPORTED_BY)
WORD = re.compile(r"[a-z]\d+vq\d")
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
ROW = Conversation(
    (
        Turn("system", "Be short."),
        Turn("user", "Rome?"),
        Turn("assistant", "I look.", tool_calls=(ToolCall("weather", {"town": "Rome"}),)),
        Turn("tool", "sunny"),
        Turn("assistant", "Sunny."),
    ),
    Origin("rows.json", 1),
    (TOOL,),
)


def strict() -> ChatTemplate:
    controls = ["<|user|>", "<|assistant|>", "<|end|>"]
    tokenizer = build_tokenizer(["<s>", "</s>", *controls], eos="</s>")
    tokenizer.chat_template = STRICT
    return ChatTemplate.resolve(tokenizer, None)


def words(texts: list[str]) -> list[str]:
    return [found[0] for text in texts for found in WORD.finditer(text)]


def words_of(chat: Conversation, is_answer: bool) -> list[str]:
    texts: list[str] = []
    for turn in chat.turns:
        if (turn.role == "assistant") == is_answer:
            calls = [f"{call.name} {json.dumps(call.arguments)}" for call in turn.tool_calls]
            texts += [turn.reasoning or "", turn.content, *calls]
    return words(texts)


@pytest.mark.parametrize("name", TEST_CHATS)
def test_every_test_chat_keeps_its_words_in_turns_of_the_same_side(name: str) -> None:
    chat = build_test_chat(TEST_CHATS[name])
    rewritten = rewrite_turns(chat, ALL)
    assert words_of(rewritten, True) == words_of(chat, True)
    declared = words([json.dumps(chat.tools)])
    questions = words_of(rewritten, False)
    assert [word for word in questions if word not in declared] == words_of(chat, False)
    assert set(declared) <= set(questions)
    assert not rewritten.tools
    assert {turn.role for turn in rewritten.turns} <= {"user", "assistant"}
    assert rewrite_turns(chat, ()) is chat
    if TEST_CHATS[name] in ("u a", "u a u a", "u ra"):
        assert rewritten is chat
    # Reasoning, or an answer without text, is not joined to the answer before it.
    for turn, following in pairwise(rewritten.turns):
        assert turn.role != following.role or not (turn.content and following.content)


def test_the_first_system_turn_is_kept_if_it_is_supported() -> None:
    rewritten = rewrite_turns(build_test_chat("s u a s u a"), (LATER_SYSTEM_TURNS,))
    roles = [turn.role for turn in rewritten.turns]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert rewritten.turns[3].content == "c3vq0\n\nc4vq0"


def test_weights_and_the_position_of_an_input_are_kept() -> None:
    given = Turn("user", "add\n\n1 2", input_start=5)
    turns = (Turn("system", "s"), given, Turn("assistant", "3", 0.5), Turn("assistant", "4", 0.0))
    rewritten = rewrite_turns(Conversation(turns, Origin("rows.json", 1), weight=2.0), ALL)
    assert rewritten.weight == 2.0
    question = rewritten.turns[0]
    assert question.content[question.input_start :] == "1 2"
    assert [turn.weight for turn in rewritten.turns[1:]] == [0.5, 0.0], (
        "not joined: a weight would be lost"
    )


@pytest.mark.parametrize(
    ("roles", "weights"),
    [
        (["assistant"], [None, None]),
        (["assistant", "tool"], [1.0, None]),
        (["assistant", "user"], [0.0, None]),
        (["assistant", "user", "tool"], [None, None]),
    ],
)
def test_the_weight_of_a_result_is_that_of_its_role(
    roles: list[str], weights: list[float | None]
) -> None:
    turns = (
        *(Turn("user", "q"), Turn("assistant", "", tool_calls=(ToolCall("f", {}),))),
        *(
            Turn("tool", "r"),
            Turn("assistant", "a"),
            Turn("user", "thanks"),
            Turn("assistant", "b"),
        ),
    )
    rewritten = rewrite_turns(Conversation(turns, Origin("rows.json", 1)), ALL, roles)
    assert [turn.weight for turn in rewritten.turns if turn.role == "user"][1:] == weights
    given = replace(turns[2], weight=0.5)
    row = Conversation((*turns[:2], given, *turns[3:]), Origin("rows.json", 1))
    assert rewrite_turns(row, ALL, roles).turns[2].weight == 0.5


def test_the_rewritten_call_and_the_answers_are_trained_on() -> None:
    template = strict()
    (encoded,) = template.encode([ROW])
    assert isinstance(encoded, Encoded)
    assert [note.kind for note in encoded.notes] == ["rewritten_turns"]
    tokenizer = template.tokenizer
    trained = tokenizer.decode(encoded.input_ids[encoded.weights > 0])
    call = '<tool_call>\n{"name": "weather", "arguments": {"town": "Rome"}}\n</tool_call>'
    assert trained.replace(" ", "") == f"I look.\n{call}<|end|>Sunny.<|end|>".replace(" ", "")
    whole = tokenizer.decode(encoded.input_ids)
    for text in ("Be short.", json.dumps(TOOL), "<tool_response>\nsunny\n</tool_response>"):
        assert text.replace(" ", "") in whole.replace(" ", "")


def test_a_prompt_equals_the_tokens_of_training_before_the_answer() -> None:
    template = strict()
    (encoded,) = template.encode([ROW])
    prompt = template.prompt(ROW)
    assert isinstance(encoded, Encoded) and prompt is not None
    assert encoded.input_ids[: len(prompt.input_ids)].tolist() == prompt.input_ids
    assert prompt.answer == "Sunny."
    chatted = Conversation(ROW.turns[:2], ROW.origin)
    row = replace(chatted, turns=(*chatted.turns, Turn("assistant", "Sunny.")))
    prompt = template.prompt(row)
    assert prompt is not None
    assert template.prompt_ids(chatted.turns) == prompt.input_ids, "a chat with a system turn"
