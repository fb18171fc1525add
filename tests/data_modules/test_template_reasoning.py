"""Reasoning is read from every form in which rows have it, and goes where the template reads it.

Also other texts that templates look for: tool results in the text of a question.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from data_modules.template import ChatTemplate, MaskConfig
from data_modules.template.named_templates import TEMPLATE_NAMES, named_template
from data_modules.template.rendering import split_reasoning
from data_modules.types import Encoded
from tests.data_modules.conftest import items_of
from tests.data_modules.published import PUBLISHED, tokenizer_for
from tests.data_modules.test_template import encode, runs

PLAIN, HARMONY = "named:plain", "named:harmony"
TEMPLATES = [
    *(f"named:{name}" for name in TEMPLATE_NAMES),
    *(pytest.param(name, marks=pytest.mark.slow) for name in list(PUBLISHED)[::3]),
]
WHY, ANSWER = "one two three", "it is one"
FORMS: dict[str, dict[str, Any]] = {
    "reasoning_content": {"content": ANSWER, "reasoning_content": WHY},
    "reasoning": {"content": ANSWER, "reasoning": WHY},
    "thinking": {"content": ANSWER, "thinking": WHY},
    "tags": {"content": f"<think>\n{WHY}\n</think>\n\n{ANSWER}"},
    "closing tag only": {"content": f"{WHY}\n</think>\n\n{ANSWER}"},
    "field and the same tags": {
        "content": f"<think>{WHY}</think>{ANSWER}",
        "reasoning_content": WHY,
    },
    "thinking part": {
        "content": [{"type": "thinking", "thinking": WHY}, {"type": "text", "text": ANSWER}]
    },
    "tags in parts": {
        "content": [
            {"type": "text", "text": f"<think>\n{WHY}\n</think>\n\n"},
            {"type": "text", "text": ANSWER},
        ]
    },
    "tags in a line": {"content": f"<think>{WHY}</think> {ANSWER}"},
    "closing tag in a line": {"content": f"{WHY} </think> {ANSWER}"},
}


@cache
def template_of(name: str, mode: str) -> ChatTemplate:
    named = name.removeprefix("named:")
    text = PUBLISHED[name] if name in PUBLISHED else named_template(named)
    return ChatTemplate.resolve(tokenizer_for(text), None, MaskConfig(reasoning=mode))


def forms_of(name: str) -> dict[str, dict[str, Any]]:
    """Return the forms to try; of a published template, those that reach it in different ways."""
    some = ("reasoning_content", "tags", "closing tag only", "tags in a line")
    return FORMS if name.startswith("named:") else {form: FORMS[form] for form in some}


def row(answer: dict[str, Any]) -> Any:
    messages = [{"role": "user", "content": "what?"}, {"role": "assistant", **answer}]
    return items_of({"messages": messages})[0]


def tokens(encoded: Encoded) -> tuple[list[int], list[float]]:
    return encoded.input_ids.tolist(), encoded.weights.tolist()


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_form_of_reasoning_is_the_same_to_a_template(name: str) -> None:
    """Tags in a line keep their white space in a template that reads no field."""
    keeps, strips, masks = (template_of(name, mode) for mode in ("keep", "strip", "mask"))
    expected = encode(keeps, row(FORMS["reasoning_content"]))
    is_lost = "lost_reasoning" in {note.kind for note in expected.notes}
    reads_field = bool(keeps._renderer.message_format.reasoning_key)
    without = tokens(encode(strips, row({"content": ANSWER})))
    (plain,) = runs(masks, row({"content": ANSWER}))
    for form, answer in forms_of(name).items():
        found, (trained,) = encode(keeps, row(answer)), runs(keeps, row(answer))
        if reads_field or "in a line" not in form:
            assert tokens(found) == tokens(expected), form
        assert ANSWER in trained and trained.count(WHY) == (0 if is_lost else 1), form
        assert ("lost_reasoning" in {note.kind for note in found.notes}) == is_lost
        assert tokens(encode(strips, row(answer))) == without, form
        masked = encode(masks, row(answer))
        assert masked.input_ids.tolist() == found.input_ids.tolist()
        (trained,) = runs(masks, row(answer))
        # Nothing before the answer is trained on.
        if is_lost:
            assert ANSWER in trained, form
        else:
            assert trained.lstrip() == plain[plain.index(ANSWER) :], form


CALL = {"tool_calls": [{"function": {"name": "look", "arguments": {"x": 1}}}]}


@pytest.mark.parametrize(
    ("name", "trained"),
    [
        ("named:qwen3", '<tool_call>\n{"name": "look", "arguments": {"x": 1}}\n</tool_call>'),
        (HARMONY, ' to=functions.look<|channel|>commentary json<|message|>{"x": 1}<|call|>'),
        ("named:gemma4", "<|tool_call>call:look{x:1}<tool_call|>"),
    ],
)
def test_masked_reasoning_before_a_call(name: str, trained: str) -> None:
    item = row({"content": "", "reasoning": WHY, **CALL})
    (found,) = runs(template_of(name, "mask"), item)
    assert found.startswith(trained)


def test_reasoning_that_the_template_leaves_out_is_not_masked_in_the_answer() -> None:
    answers = [
        {"role": "user", "content": "what?"},
        {"role": "assistant", "content": "<think>one</think>it is one"},
    ]
    (item,) = items_of({"messages": answers * 2})
    first, last = runs(template_of(HARMONY, "mask"), item)
    assert first == "<|channel|>final<|message|>it is one"
    assert last == "it is one<|return|>"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("<think>a</think>b", ("<think>", "a", "</think>", "b", "")),
        (" <think>\n a \n</think>\n\n b \n", (" <think>\n ", "a", " \n</think>\n\n ", "b", " \n")),
        ("a\n</think>\nb", ("", "a", "\n</think>\n", "b", "")),
        ("</think>\n\nb", ("", "", "</think>\n\n", "b", "")),
        ("<think>\n\n</think>\n\nb", ("<think>", "", "\n\n</think>\n\n", "b", "")),
        ("<think>a</think>", ("<think>", "a", "</think>", "", "")),
        (
            "<think>a</think>b<think>c</think>d",
            ("<think>", "a", "</think>", "b<think>c</think>d", ""),
        ),
        ("write `</think>` at the end", None),
        ("first <think>a</think>b", None),
        ("<think>without end", None),
        ("plain", None),
    ],
)
def test_reasoning_in_a_text(content: str, expected: Any) -> None:
    parts = split_reasoning(content)
    assert parts == expected
    assert parts is None or "".join(parts) == content


@pytest.mark.parametrize("name", ["named:qwen3", HARMONY, PLAIN])
def test_tags_that_an_answer_only_mentions_stay_in_it(name: str) -> None:
    text = "write `</think>` after it"
    (trained,) = runs(template_of(name, "keep"), row({"content": text}))
    assert text in trained and trained.count("</think>") <= 2


def test_a_block_without_end_is_stripped_and_the_row_left_out() -> None:
    encoded = encode(template_of(PLAIN, "strip"), row({"content": f"<think>\n{WHY}"}))
    assert not encoded.weights.any()


@pytest.mark.parametrize("name", ["named:qwen3", HARMONY])
def test_a_chat_moves_reasoning_as_training_does(name: str) -> None:
    template = template_of(name, "keep")
    item = row(FORMS["tags"])
    again = row(FORMS["reasoning"]).turns
    assert template.prompt_ids((*item.turns, again[0])) == template.prompt_ids((*again, again[0]))


def tool_text(result: str) -> Any:
    messages = [
        {"role": "user", "content": "what?"},
        {"role": "assistant", "content": '<think>look</think><tool_call>{"name": "f"}</tool_call>'},
        {"role": "user", "content": result},
        {"role": "assistant", "content": f"<think>{WHY}</think>{ANSWER}"},
    ]
    return items_of({"messages": messages})[0]


@pytest.mark.parametrize("name", TEMPLATES)
def test_tool_results_in_the_text_of_a_question(name: str) -> None:
    template = template_of(name, "keep")
    for result in (
        "<tool_response>36</tool_response>\n<tool_response>\n</tool_response>",
        " <div>36</div>\n",
        "<tool_response>",
    ):
        call, answer = runs(template, tool_text(result))
        assert '<tool_call>{"name": "f"}</tool_call>' in call and ANSWER in answer
        assert "36" not in call + answer


def test_tool_results_in_text_keep_the_reasoning_before_them() -> None:
    """Qwen's templates keep reasoning after a question unless it is a tool result in tags."""
    template = template_of("named:qwen3", "keep")
    call, answer = runs(template, tool_text("<tool_response>\n36\n</tool_response>"))
    assert call.startswith("<think>\nlook\n</think>\n\n<tool_call>")
    assert answer == f"<think>\n{WHY}\n</think>\n\n{ANSWER}<|im_end|>"
    call, _ = runs(template, tool_text("<div>36</div>"))
    assert call.startswith("<tool_call>")
