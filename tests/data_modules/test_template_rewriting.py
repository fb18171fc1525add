"""Turns that a chat template refuses are written in turns that it takes, and nothing is lost."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise

import pytest

from data_modules.messages import Origin
from data_modules.template import ChatTemplate, MaskConfig
from data_modules.template.checks import TEST_CHATS, build_test_chat
from data_modules.template.rendering import UnsupportedTurns, rewrite_turns
from data_modules.template.template import RowProblem
from data_modules.types import Conversation, Encoded, ToolCall, Turn
from tests.data_modules.conftest import build_tokenizer

ALL = UnsupportedTurns(tools=True, system=True, later_system=True, questions=True, answers=True)
WORD = re.compile(r"[a-z]\d+vq\d")
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
ASKED = Conversation(
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


def strict(mask: MaskConfig | None = None) -> ChatTemplate:
    controls = ["<|user|>", "<|assistant|>", "<|end|>"]
    tokenizer = build_tokenizer(["<s>", "</s>", *controls], eos="</s>")
    tokenizer.chat_template = STRICT
    return ChatTemplate.resolve(tokenizer, None, mask)


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
def test_every_form_keeps_its_words_and_whose_they_are(name: str) -> None:
    chat = build_test_chat(TEST_CHATS[name])
    written = rewrite_turns(chat, ALL)
    assert words_of(written, True) == words_of(chat, True)
    declared = words([json.dumps(chat.tools)])
    questions = words_of(written, False)
    assert [word for word in questions if word not in declared] == words_of(chat, False)
    assert set(declared) <= set(questions)
    assert not written.tools
    assert {turn.role for turn in written.turns} <= {"user", "assistant"}
    # A thought, or an answer without a word, is not joined to the answer before it.
    for one, other in pairwise(written.turns):
        assert one.role != other.role or not (one.content and other.content)


@pytest.mark.parametrize("name", TEST_CHATS)
def test_a_chat_that_a_template_takes_stays_itself(name: str) -> None:
    chat = build_test_chat(TEST_CHATS[name])
    assert rewrite_turns(chat, UnsupportedTurns()) is chat
    if TEST_CHATS[name] in ("u a", "u a u a", "u ra"):
        assert rewrite_turns(chat, ALL) is chat


def test_weights_and_the_place_of_an_input_are_kept() -> None:
    given = Turn("user", "add\n\n1 2", input_start=5)
    turns = (Turn("system", "s"), given, Turn("assistant", "3", 0.5), Turn("assistant", "4", 0.0))
    written = rewrite_turns(Conversation(turns, Origin("rows.json", 1), weight=2.0), ALL)
    assert written.weight == 2.0
    question = written.turns[0]
    assert question.content[question.input_start :] == "1 2"
    assert [turn.weight for turn in written.turns[1:]] == [0.5, 0.0], "joined, a weight would go"


@pytest.mark.parametrize(
    ("roles", "weights"),
    [
        (["assistant"], [None, None]),
        (["assistant", "tool"], [1.0, None]),
        (["assistant", "user"], [0.0, None]),
        (["assistant", "user", "tool"], [None, None]),
    ],
)
def test_a_result_is_trained_on_as_its_role_says(
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
    written = rewrite_turns(Conversation(turns, Origin("rows.json", 1)), ALL, roles)
    assert [turn.weight for turn in written.turns if turn.role == "user"][1:] == weights
    given = replace(turns[2], weight=0.5)
    row = Conversation((*turns[:2], given, *turns[3:]), Origin("rows.json", 1))
    assert rewrite_turns(row, ALL, roles).turns[2].weight == 0.5


def test_what_is_learned_of_a_call_is_the_call_and_the_answers() -> None:
    template = strict()
    (encoded,) = template.encode([ASKED])
    assert isinstance(encoded, Encoded)
    assert [note.kind for note in encoded.notes] == ["rewritten_turns"]
    tokenizer = template._tokenizer
    trained = tokenizer.decode(encoded.input_ids[encoded.weights > 0])
    call = '<tool_call>\n{"name": "weather", "arguments": {"town": "Rome"}}\n</tool_call>'
    assert trained.replace(" ", "") == f"I look.\n{call}<|end|>Sunny.<|end|>".replace(" ", "")
    whole = tokenizer.decode(encoded.input_ids)
    for text in ("Be short.", json.dumps(TOOL), "<tool_response>\nsunny\n</tool_response>"):
        assert text.replace(" ", "") in whole.replace(" ", "")


def test_a_prompt_is_what_training_saw_before_the_answer() -> None:
    template = strict()
    (encoded,) = template.encode([ASKED])
    prompt = template.prompt(ASKED)
    assert isinstance(encoded, Encoded) and prompt is not None
    assert encoded.input_ids[: len(prompt.input_ids)].tolist() == prompt.input_ids
    assert prompt.answer == "Sunny."
    chatted = Conversation(ASKED.turns[:2], ASKED.origin)
    row = replace(chatted, turns=(*chatted.turns, Turn("assistant", "Sunny.")))
    asked = template.prompt(row)
    assert asked is not None
    assert template.prompt_ids(chatted.turns) == asked.input_ids, "a chat with a system turn"


def test_rows_are_refused_where_that_is_asked_for() -> None:
    (refused,) = strict(MaskConfig(unsupported_turns="refuse")).encode([ASKED])
    assert isinstance(refused, RowProblem)
    assert "roles must alternate" in refused.reason
