"""Every trained token belongs to an answer, for published templates and their building blocks.

Published templates are read from an installed package. The others are small ones of our own that
behave as those of families which no package carries.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from common.errors import DataError
from data_modules.format import convert_row
from data_modules.template import ChatTemplate
from data_modules.template.marks import RenderedChat
from data_modules.template.named_templates import (
    TEMPLATE_NAMES,
    TEST_CHATS,
    build_test_chat,
    named_template,
    run_test_chats,
)
from data_modules.template.rendering import Chat, Renderer, RowRefusedError
from data_modules.template.spans import SpanFinder
from data_modules.types import Conversation, Encoded, ToolCall, Turn
from tests.data_modules.conftest import ORIGIN, SHARED, read_rows
from tests.data_modules.published import PUBLISHED, published_templates, tokenizer_for
from tests.data_modules.test_template import encode, runs

pytestmark = pytest.mark.slow

_CALL = (
    "{% for call in m.tool_calls or [] %}{{ '<call>' + call.function.name + ' ' "
    "+ call.function.arguments|tojson + '</call>' }}{% endfor %}"
)
_PROMPT = "{% if add_generation_prompt %}{{ 'PROMPT' }}{% endif %}"
_LAST_QUESTION = (
    "{% set ns = namespace(last=-1, name='') %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
TEMPLATES = {
    "reasoning of earlier answers dropped": _LAST_QUESTION
    + "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}"
    "{% if loop.index0 > ns.last %}{{ '<think>' + (m.reasoning_content or '') + '</think>' }}"
    "{% endif %}{% endif %}{{ m.content }}" + _CALL + "{{ '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>' }}{% endif %}",
    "several channels, results under the name of the call": "{% set ns = "
    "namespace(name='') %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content and loop.last %}"
    "{{ '<|start|>assistant<|channel|>think<|message|>' + m.reasoning_content + '<|end|>' }}"
    "{% endif %}{% if m.tool_calls %}{% set ns.name = m.tool_calls[0].function.name %}"
    "{{ '<|start|>assistant to=' + ns.name + '<|message|>' "
    "+ m.tool_calls[0].function.arguments|tojson + '<|call|>' }}{% else %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content "
    "+ ('<|return|>' if loop.last else '<|end|>') }}{% endif %}{% else %}"
    "{{ '<|start|>' + (ns.name if m.role == 'tool' else m.role) + '<|message|>' "
    "+ m.content|tojson + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}",
    "stop token before the next message only": "[gMASK]{% for m in messages %}"
    "{{ {'user': '<|user|>', 'assistant': '<|assistant|>', 'tool': '<|observation|>', "
    "'system': '<|system|>'}[m.role] + '\n' + m.content|trim }}"
    + _CALL
    + "{% endfor %}"
    + _PROMPT.replace("PROMPT", "<|assistant|>\n"),
    "two tokens end a turn": "{% for m in messages %}{{ '<|turn|>' + m.role + '<|response|>' "
    "+ m.content }}"
    + _CALL
    + "{{ '<|/response|><|/turn|>' }}{% endfor %}"
    + _PROMPT.replace("PROMPT", "<|turn|>assistant<|response|>"),
    "a header after every conversation": "{% for m in messages %}"
    "{{ '<|turn|>' + m.role + '<|say|>' + m.content }}"
    + _CALL
    + "{{ '<|/turn|>' }}{% endfor %}{{ '<|turn|>assistant<|say|>' }}",
    "results inside the answer": "{% for m in messages %}{% if m.role != 'tool' %}"
    "{% set before = messages[loop.index0 - 1].role if loop.index0 else '' %}"
    "{% if before != 'tool' %}{{ '<|turn>' + m.role + '\n' }}{% endif %}{{ m.content|trim }}"
    + _CALL
    + "{% if m.tool_calls %}{% for k in range(loop.index, messages|length) %}"
    "{% if messages[k].role == 'tool' and messages[k - 1].role in ('tool', 'assistant') %}"
    "{{ '<result>' + messages[k].content + '</result>' }}{% else %}{% break %}{% endif %}"
    "{% endfor %}{% else %}{{ '<turn|>\n' }}{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<|turn>assistant\n' }}"
    "{% endif %}",
    "text after the results": "{% for m in messages %}{% if m.role != 'tool' %}"
    "{% set before = messages[loop.index0 - 1].role if loop.index0 else '' %}"
    "{% if before != 'tool' %}{{ '<|turn>' + m.role + '\n' }}{% endif %}"
    + _CALL
    + "{% if m.tool_calls %}{% set ns = namespace(seen=false) %}"
    "{% for k in range(loop.index, messages|length) %}{% if messages[k].role != 'tool' %}"
    "{% break %}{% endif %}{% set ns.seen = true %}"
    "{{ '<|tool_response>' + messages[k].content + '<tool_response|>' }}{% endfor %}"
    "{{ m.content + ('' if ns.seen else '<|tool_response>') }}"
    "{% else %}{{ m.content + '<turn|>\n' }}{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<|turn>assistant\n' }}"
    "{% endif %}",
    "system in the first question, turns merged": "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ '[INST] ' + m.content + '\n\n' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content }}"
    "{% if loop.last or messages[loop.index].role != 'assistant' %}{{ eos_token }}{% endif %}"
    "{% else %}{{ ('' if loop.index0 and messages[loop.index0 - 1].role == 'system' "
    "else '[INST] ') + m.content + ' [/INST]' }}{% endif %}{% endfor %}",
    "arguments as JSON text, no content next to calls": "{% for m in messages %}"
    "{{ '<|' + m.role + '|>' }}{% if m.tool_calls and m.content is none %}"
    "{% for call in m.tool_calls %}"
    "{{ '<call>' + call.function.name + '\n' + call.function.arguments + '</call>' }}"
    "{% endfor %}{% else %}{{ m.content }}{% endif %}{{ '<|end|>' }}{% endfor %}"
    + _PROMPT.replace("PROMPT", "<|assistant|>"),
    "ids of nine characters": "{% for m in messages %}{% for call in m.tool_calls or [] %}"
    "{% if not call.id or call.id|length != 9 %}{{ raise_exception('nine') }}{% endif %}"
    "{% endfor %}{{ '<|' + m.role + '|>' + m.content }}{% for call in m.tool_calls or [] %}"
    "{{ call.id + call.function.name + call.function.arguments|tojson }}{% endfor %}"
    "{{ (m.tool_call_id or '') + '<|end|>' }}{% endfor %}"
    + _PROMPT.replace("PROMPT", "<|assistant|>"),
    "the last answer is named": "{% for m in messages %}{{ '<|' + m.role + '|>' }}"
    "{% if m.role == 'assistant' %}{{ 'my ' if tools }}{{ 'final' if loop.last else 'first' }}\n"
    "{% endif %}{{ m.content }}"
    + _CALL
    + "{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}"
    "{{ 'my ' if tools }}final\n{% endif %}",
    "text after the calls": "{% for m in messages %}{{ '<|' + m.role + '|>' }}"
    + _CALL
    + "{{ m.content + '<|end|>' }}{% endfor %}"
    + _PROMPT.replace("PROMPT", "<|assistant|>"),
}
NAMED = {f"named:{name}": named_template(name) for name in TEMPLATE_NAMES}
ALL = TEMPLATES | NAMED | published_templates()
# Those with `_training` have blocks for the answers, written by hand.
TRAINING = [name for name in published_templates() if name.endswith("_training")]


@cache
def template_of(name: str) -> ChatTemplate:
    return ChatTemplate(tokenizer_for(ALL[name]), ALL[name], "")


def is_our_error(reason: str) -> bool:
    return "refuses this row" not in reason


@pytest.mark.parametrize("name", [name for name in ALL if name not in TRAINING])
def test_no_template_trains_on_another_turn(name: str) -> None:
    found = run_test_chats(template_of(name).trace)
    assert list(found) == list(TEST_CHATS)
    refused = {name: str(each) for name, each in found.items() if not isinstance(each, list)}
    assert not any(map(is_our_error, refused.values())), refused
    assert [each for name, each in found.items() if name not in refused and each] == []
    assert len(refused) <= (0 if name in TEMPLATES else len(TEST_CHATS) - 9)


CHANNELS = "several channels, results under the name of the call"
OPEN = "stop token before the next message only"
INSIDE = "results inside the answer"
AFTER_RESULTS = "text after the results"


@pytest.mark.parametrize(
    ("name", "pattern", "trained", "stops"),
    [
        (
            CHANNELS,
            "u ra u ra",
            [
                "<|channel|>final<|message|>c1vq0",
                "<|channel|>think<|message|>r3vq0<|end|><|start|>assistant<|channel|>final"
                "<|message|>c3vq0<|return|>",
            ],
            {"<|return|>"},
        ),
        (
            CHANNELS,
            "T u c t a",
            [
                ' to=f1vq0<|message|>{"p1vq0": "k1vq0"}<|call|>',
                "<|channel|>final<|message|>c3vq0<|return|>",
            ],
            {"<|call|>", "<|return|>"},
        ),
        (OPEN, "u a u a", ["c1vq0<|user|>", "c3vq0<|user|>"], {"<|user|>"}),
        (
            OPEN,
            "T u c t a",
            ['<call>f1vq0 {"p1vq0": "k1vq0"}</call><|observation|>', "c3vq0<|user|>"],
            {"<|observation|>", "<|user|>"},
        ),
        # The stop token of a question does not end an answer that another answer follows.
        (OPEN, "u a a u a", ["c1vq0", "c2vq0<|user|>", "c4vq0<|user|>"], {"<|user|>"}),
        ("two tokens end a turn", "u a", ["c1vq0<|/response|><|/turn|>"], {"<|/turn|>"}),
        ("a header after every conversation", "u a", ["c1vq0<|/turn|>"], {"<|/turn|>"}),
        (
            INSIDE,
            "T u ac t a",
            ['c1vq0<call>f1vq0 {"p1vq0": "k1vq0"}</call>', "c3vq0<turn|>"],
            {"</call>", "<turn|>"},
        ),
        (
            AFTER_RESULTS,
            "T u ac t a",
            ['<call>f1vq0 {"p1vq0": "k1vq0"}</call><|tool_response>', "c1vq0c3vq0<turn|>"],
            {"<|tool_response>", "<turn|>"},
        ),
        # A word that differs from the prompt's is trained on as a whole.
        (
            "the last answer is named",
            "u a u a",
            ["first\nc1vq0<|end|>", "c3vq0<|end|>"],
            {"<|end|>"},
        ),
        (
            "the last answer is named",
            "T u a u a",
            ["first\nc1vq0<|end|>", "c3vq0<|end|>"],
            {"<|end|>"},
        ),
        (
            "system in the first question, turns merged",
            "s u a u a",
            [" c2vq0</s>", " c4vq0</s>"],
            {"</s>"},
        ),
    ],
)
def test_stop_tokens_of_answers(
    name: str, pattern: str, trained: list[str], stops: set[str]
) -> None:
    template = ChatTemplate(template_of(name).tokenizer, TEMPLATES[name], "")
    assert runs(template, build_test_chat(pattern)) == trained
    ids = {template.stop_texts[stop] for stop in stops}
    assert ids <= template.stop_token_ids
    assert template._layout_builder.seen_stops == stops


def notes_of(name: str, pattern: str) -> set[str]:
    return {note.kind for note in encode(template_of(name), build_test_chat(pattern)).notes}


def test_dropped_calls_texts_and_reasoning_are_noted() -> None:
    # One of two calls is written.
    assert notes_of(CHANNELS, "T u cc tt a") == {"lost_tools", "lost_tool_calls"}
    assert notes_of(CHANNELS, "T u ac t a") == {"lost_tools", "lost_content"}
    assert notes_of(AFTER_RESULTS, "u ac") == {"lost_content"}
    earlier = "reasoning of earlier answers dropped"
    assert notes_of(earlier, "u ra u ra") == {"lost_reasoning", "other_prompt"}
    assert notes_of(earlier, "u ra") == set()


def test_a_wrong_mask_is_an_error_when_the_template_is_resolved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    render = SpanFinder.render

    def resolve(field: str, value: Callable[[RenderedChat], int]) -> str:
        """Resolve a template whose spans are changed."""

        def changed(finder: SpanFinder, chats: Sequence[Chat]) -> list[Any]:
            return [
                chat._replace(spans=[s._replace(**{field: value(chat)}) for s in chat.spans])
                if isinstance(chat, RenderedChat)
                else chat
                for chat in render(finder, chats)
            ]

        monkeypatch.setattr(SpanFinder, "render", changed)
        text = named_template("chatml") + f"{{# {field} not checked yet #}}"
        with pytest.raises(DataError) as caught:
            ChatTemplate.resolve(tokenizer_for(text), None)
        return str(caught.value)

    start = "the tokenizer's own chat template: in the test chat "
    said = resolve("stop_end", lambda chat: len(chat.text))
    assert said.startswith(f"{start}`two answers` turn 3 (user) is trained on")
    said = resolve("start", lambda chat: len(chat.text))
    assert said.startswith(f"{start}`one answer` `c1vq0` of turn 2 (assistant) is not trained on")


@pytest.mark.parametrize("name", TRAINING[::2])
def test_masks_equal_those_of_the_generation_blocks(name: str) -> None:
    """Compare with the generation blocks that TRL wrote by hand into the same template.

    They alone train on headers that the generation prompt writes, on text after the stop token, on
    the end of a message if the template ends the last one differently, and on empty turns. We alone
    train on text that the generation prompt leaves to the model. Neither is ever text of a row.
    """
    template = template_of(name)
    for pattern in TEST_CHATS.values():
        chat = template._rewrite(build_test_chat(pattern))
        traced = template.trace(chat)
        if isinstance(traced, RowRefusedError):
            continue
        theirs = generation_mask(template, chat, len(traced.weights))
        ours = traced.weights > 0
        ids = traced.tokenized.ids
        for run in trained_runs(theirs & ~ours):
            text = template.tokenizer.decode(ids[run])
            if pattern == "T u ac" and text == "c1vq0":
                assert "lost_content" in traced.notes  # written only before a result
                continue
            assert "vq" not in text
            after, before = run.stop, run.start - 1
            is_header = after < len(ours) and ours[after]
            is_after_stop = before >= 0 and ours[before]
            is_empty = not is_header and not is_after_stop
            assert is_header or is_after_stop or is_empty
            if is_after_stop and not is_header:
                assert not text.strip() or text.strip() in ("<|end|>", "</s>", "<|system|>")
        for run in trained_runs(ours & ~theirs):
            text = template.tokenizer.decode(ids[run])
            assert "vq" not in text
            assert text in ("<|turn>model\n", "<|tool_response>"), "generated by the model"


def generation_mask(template: ChatTemplate, chat: Conversation, length: int) -> Any:
    prepared = template._renderer.prepare(chat, "keep")
    encoded = template.tokenizer.apply_chat_template(
        template._renderer.messages(prepared),
        tools=[dict(tool) for tool in chat.tools] or None,
        return_assistant_tokens_mask=True,
        return_dict=True,
    )
    mask = np.zeros(length, bool)
    mask[: len(encoded["assistant_masks"])] = encoded["assistant_masks"]
    return mask


def trained_runs(chosen: Any) -> Iterator[slice]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], chosen.astype(int), [0]])))
    for start, end in edges.reshape(-1, 2).tolist():
        yield slice(start, end)


REAL = ("glaive_toolcall_en.json", "oasst_trees.jsonl", "sharegpt_dummy_conversation.json")


@cache
def real_conversations() -> list[Conversation]:
    """Return some of the shared conversations, half of them a second time with reasoning."""
    chats: list[Conversation] = []
    for name in REAL:
        rows = read_rows(str(SHARED / "chat" / name))
        items = [item for row in rows for item in convert_row(row, _format_of(name), {})]
        chats += [item for item in items if isinstance(item, Conversation)][:20]
    with_reasoning = [
        replace(
            chat,
            turns=tuple(
                replace(turn, reasoning=f"Step {number}.\nIt is near.")
                if turn.role == "assistant"
                else turn
                for number, turn in enumerate(chat.turns)
            ),
        )
        for chat in chats[::2]
    ]
    return chats + with_reasoning


def _format_of(name: str) -> str:
    return "oasst" if name.startswith("oasst") else "sharegpt"


@pytest.mark.parametrize("name", list(PUBLISHED)[::5])
def test_real_conversations_are_usable(name: str) -> None:
    if not (SHARED / "chat").is_dir():
        pytest.skip("needs the shared data")
    template, chats = template_of(name), real_conversations()
    problems = [row for row in template.encode(chats) if not isinstance(row, Encoded)]
    assert not any(is_our_error(str(problem)) for problem in problems)
    assert len(problems) <= len(chats) // 100


ROUND = (Turn("user", "what is it?"), Turn("assistant", "it is one"))


def test_a_long_conversation_is_rendered_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = 0
    apply_template = Renderer.apply_template

    def count(renderer: Renderer, chats: Sequence[Chat], **options: Any) -> list[str]:
        nonlocal rendered
        rendered += sum(len(chat.turns) for chat in chats)
        return apply_template(renderer, chats, **options)

    monkeypatch.setattr(Renderer, "apply_template", count)
    for num_rounds in (50, 100):
        text = named_template("qwen3")
        template = ChatTemplate(tokenizer_for(text), text, "")
        rendered = 0
        encode(template, Conversation(ROUND * num_rounds, ORIGIN))
        assert rendered < 8 * len(ROUND) * num_rounds + 100


def test_private_characters_in_a_row_are_not_taken_for_marks() -> None:
    turns = (Turn("user", "\ue0f1c1.0\ue0f2 what?"), Turn("assistant", "\ue0f3one\ue0f4"))
    template = template_of("two tokens end a turn")
    assert runs(template, Conversation(turns, ORIGIN)) == ["\ue0f3one\ue0f4<|/response|><|/turn|>"]


@pytest.mark.parametrize("own", ["</call>", "</call><|/response|><|/turn|>", "Zq7k00000"])
def test_an_argument_that_looks_like_the_end_of_its_call(own: str) -> None:
    call = ToolCall("f", {"x": f"one{own}two", "n": 3}, "call_1")
    turns = (
        Turn("user", "what?"),
        Turn("assistant", "", tool_calls=(call,)),
        Turn("tool", own, tool_call_id="call_1"),
        Turn("assistant", "two"),
    )
    template = template_of("two tokens end a turn")
    arguments = json.dumps({"x": f"one{own}two", "n": 3})
    assert "".join(runs(template, Conversation(turns, ORIGIN))) == (
        f"<call>f {arguments}</call><|/response|><|/turn|>two<|/response|><|/turn|>"
    )


def test_an_answer_that_holds_what_stands_for_an_id() -> None:
    """In a row that no skeleton matches, whose own texts are marked."""
    changes_questions = TEMPLATES["text after the calls"].replace(
        "{{ m.content", "{{ (m.reasoning_content + '[so]') if m.reasoning_content }}{{ m.content"
    )
    text = changes_questions.replace("m.content +", "(m.content|replace('w', 'W')) +")
    turns = (
        *(Turn("user", "what?"), Turn("assistant", "", tool_calls=(ToolCall("f", {}, "call_1"),))),
        *(Turn("tool", "2", tool_call_id="call_1"), Turn("assistant", "Zq7k00000", reasoning="no")),
    )
    trained = runs(ChatTemplate(tokenizer_for(text), text, ""), Conversation(turns, ORIGIN))
    assert trained == ["<call>f {}</call><|end|>", "no[so]Zq7k00000<|end|>"]
