"""What is trained on follows the prompt of chat, evaluate and serve, or the row is counted."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from common.errors import DataError, Origin
from data_modules.template import ChatTemplate, MaskConfig
from data_modules.template.named_templates import TEMPLATE_NAMES, named_template
from data_modules.types import Conversation, Turn
from tests.data_modules.conftest import build_tokenizer
from tests.data_modules.published import published_templates, tokenizer_for
from tests.data_modules.test_template import encode, runs

PUBLISHED = {
    name: text for name, text in published_templates().items() if not name.endswith("_training")
}
NEMOTRON = [f"nemotron_3_{name}" for name in ("5_lightning", "nano", "super", "ultra")]
DEEPSEEK = ["deepseek_r1_distill", "deepseekv3"]
ORIGIN = Origin("rows.json", 7)
ASK, SAY = Turn("user", "what?"), Turn("assistant", "it is one")
THINK = Turn("assistant", "it is one", reasoning="one two three")
ROWS = {"plain": (ASK, SAY), "reasoning": (ASK, THINK), "two": (ASK, THINK, ASK, THINK)}
OPENS_BLOCK = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
DIFFERENT = {
    # They drop reasoning, and prompt for it.
    **{name: {"plain", "reasoning", "two"} for name in DEEPSEEK},
    # Without reasoning, they write an empty block of another form.
    **{name: {"plain", "two"} for name in NEMOTRON},
    "qwen3_5_nothink": {"reasoning", "two"},
    # The reasoning of earlier answers is dropped.
    **{name: {"two"} for name in ("qwen3_5_think", "qwen3_6")},
    "opens block": {"plain"},
}


@cache
def template_of(name: str) -> ChatTemplate:
    text = {"opens block": OPENS_BLOCK, **PUBLISHED}.get(name) or named_template(name)
    return ChatTemplate.resolve(tokenizer_for(text), None)


@pytest.mark.parametrize(
    "name",
    [
        "opens block",
        *TEMPLATE_NAMES,
        *(pytest.param(name, marks=pytest.mark.slow) for name in PUBLISHED),
    ],
)
def test_answers_after_another_text_than_their_prompt_are_counted(name: str) -> None:
    template = template_of(name)
    for kind, turns in ROWS.items():
        item = Conversation(turns, ORIGIN)
        encoded = encode(template, item)
        kinds = {note.kind for note in encoded.notes}
        assert ("other_prompt" in kinds) == (kind in DIFFERENT.get(name, ())), kind
        prompt = template.prompt_ids(turns[:-1])
        if not kinds & {"other_prompt", "lost_reasoning"}:
            assert encoded.input_ids.tolist()[: len(prompt)] == prompt


def test_the_note_shows_the_prompt_and_masked_answers_are_not_counted() -> None:
    (note,) = encode(template_of("opens block"), Conversation((ASK, SAY), ORIGIN)).notes
    assert note.seen.endswith("assistant\\n<think>\\n)")
    turns = (ASK, Turn("assistant", "it is one", 0.0), ASK, THINK)
    notes = encode(template_of("opens block"), Conversation(turns, ORIGIN)).notes
    assert "other_prompt" not in {note.kind for note in notes}


CHATML = named_template("chatml")
FOR_TOOLS = "  with tools\n" + named_template("qwen3") + "\n"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


def several(templates: Any) -> ChatTemplate:
    tokenizer = build_tokenizer(["</s>", "<|im_start|>", "<|im_end|>"], eos="</s>")
    tokenizer.chat_template = templates
    return ChatTemplate.resolve(tokenizer, None, MaskConfig())


@pytest.mark.parametrize("rag", [{}, {"rag": "{{ documents }}"}])
def test_of_several_templates_the_one_for_tools_renders_rows_with_tools(
    rag: dict[str, str],
) -> None:
    template = several({"tool_use": FOR_TOOLS, "default": CHATML + "\n", **rag})
    assert template.note.endswith("the tokenizer's (`tool_use` for rows with tools)")
    alone = {name: several(text) for name, text in (("tools", FOR_TOOLS), ("none", CHATML))}
    for tools in ((), (TOOL,)):
        item = Conversation((ASK, SAY, ASK, SAY), ORIGIN, tools)
        expected = alone["tools" if tools else "none"]
        assert runs(template, item) == runs(expected, item)
        found = encode(template, item).input_ids.tolist()
        assert found == encode(expected, item).input_ids.tolist()
        prompts = [each.prompt(item) for each in (template, expected)]
        assert prompts[0] == prompts[1]


def test_several_templates_without_a_default_are_refused() -> None:
    with pytest.raises(DataError, match="tool_use, rag but no default"):
        several({"tool_use": CHATML, "rag": CHATML})
