"""What is trained on follows the prompt of chat, evaluate and serve, or the row is counted.

Arguments of the chat template: of a row, and of the run as defaults in the template.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from common.errors import DataError
from data_modules.format import RowError
from data_modules.settings import DataConfig, check_datasets
from data_modules.template import ChatTemplate, MaskConfig
from data_modules.template.named_templates import TEMPLATE_NAMES, named_template, set_defaults
from data_modules.template.rendering import Chat, MessageFormat, Renderer
from data_modules.types import Conversation, Turn
from tests.data_modules.conftest import ORIGIN, build_tokenizer, items_of
from tests.data_modules.published import PUBLISHED, tokenizer_for
from tests.data_modules.test_template import encode, runs

NEMOTRON = [f"nemotron_3_{name}" for name in ("5_lightning", "nano", "super", "ultra")]
DEEPSEEK = ["deepseek_r1_distill", "deepseekv3"]
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
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in sorted({*list(PUBLISHED)[::4], *DIFFERENT} & PUBLISHED.keys())
        ),
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


def test_of_several_templates_the_one_for_tools_renders_rows_with_tools() -> None:
    rag = "{{ documents }}"
    template = several({"tool_use": FOR_TOOLS, "default": CHATML + "\n", "rag": rag})
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


TURNS = (ASK, SAY)
# Writes an argument, and with another one an opening tag into the prompt and the answers.
TEMPLATE = (
    "  {% if effort is defined %}{{ 'effort ' ~ effort ~ '\n' }}{% endif %}\n"
    "{% set open = '<think>\n' if thinks is not defined or thinks else '' %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{{ open }}{% endif %}{{ m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' + open }}{% endif %}"
)


def resolve(text: str = TEMPLATE, **kwargs: Any) -> ChatTemplate:
    tokenizer = tokenizer_for(text + "<|im_start|><|im_end|>")
    tokenizer.chat_template = text
    return ChatTemplate.resolve(tokenizer, None, template_kwargs=kwargs)


def row(form: str = "messages", **columns: Any) -> Any:
    messages = [{"role": turn.role, "content": turn.content} for turn in TURNS]
    values = {
        "messages": {"messages": messages},
        "sharegpt": {"conversations": messages},
        "alpaca": {"instruction": "what?", "output": "it is one"},
        "prompt_completion": {"prompt": messages[:1], "completion": messages[1:]},
    }[form]
    return items_of({**values, **columns}, form)[0]


def text_of(template: ChatTemplate, item: Conversation) -> str:
    return str(template.tokenizer.decode(encode(template, item).input_ids.tolist()))


@pytest.mark.parametrize(
    ("form", "as_text"),
    [("messages", False), ("sharegpt", True), ("alpaca", False), ("prompt_completion", True)],
)
def test_a_row_is_rendered_with_its_own_arguments(form: str, as_text: bool) -> None:
    kwargs = {"effort": "high", "thinks": False}
    item = row(form, chat_template_kwargs=json.dumps(kwargs) if as_text else kwargs)
    template = resolve()
    plain, given, again = template.encode([row(form), item, row(form)])
    decode = template.tokenizer.decode
    assert decode(given.input_ids.tolist()).lstrip() == (
        "effort high\n<|im_start|>user\nwhat?<|im_end|>\n<|im_start|>assistant\nit is one<|im_end|>"
    )
    assert plain.input_ids.tolist() == again.input_ids.tolist()
    assert "<think>" in decode(plain.input_ids.tolist())
    assert runs(template, item) == runs(template, row(form)) == ["it is one<|im_end|>"]
    prompt = template.prompt(item)
    assert prompt is not None
    assert prompt.input_ids == given.input_ids.tolist()[: len(prompt.input_ids)]


def test_arguments_of_the_run_are_defaults_of_all_prompts_and_of_the_saved_template() -> None:
    template = resolve(thinks=False, effort="low")
    item = row()
    assert "effort low" in text_of(template, item)
    assert "<think>" not in text_of(template, item)
    assert "effort high" in text_of(template, row(chat_template_kwargs={"effort": "high"}))
    ids = template.prompt_ids(TURNS[:1])
    prompt = template.prompt(item)
    assert prompt is not None and ids == prompt.input_ids
    again = ChatTemplate.resolve(template.tokenizer, None)
    assert again.prompt_ids(TURNS[:1]) == ids
    assert again.text == template.text
    assert template.hash != resolve().hash
    assert template.note.endswith('; with thinks=false, effort="low"')
    same = ChatTemplate.resolve(
        template.tokenizer, None, template_kwargs={"thinks": False, "effort": "low"}
    )
    assert same.text == template.text


def test_arguments_that_the_template_does_not_read_are_told() -> None:
    assert resolve(efort=1).note.endswith("; with efort=1 (which it does not read)")
    notes = encode(resolve(), row(chat_template_kwargs={"efort": 1})).notes
    assert [(note.kind, note.seen) for note in notes] == [("unread_kwargs", "efort")]


@pytest.mark.parametrize(
    "value", [None, True, -0.5, 1e30, "a'b\"\\n\n{% x %}{{\u00e9\U0001f600", {"a'": [1, [], None]}]
)
@pytest.mark.parametrize("text", ["  {% if x %}{% endif %}", "\n\n", "{%- if true %}{% endif %} "])
def test_a_default_is_the_value_and_changes_nothing_else(value: Any, text: str) -> None:
    tokenizer, text = build_tokenizer(["</s>"], eos="</s>"), text + "{{ x|tojson }}\n"
    given = Renderer(tokenizer, text).render([Chat(TURNS, (), {"x": value})])
    assert Renderer(tokenizer, set_defaults(text, {"x": value})).render([Chat(TURNS)]) == given


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, text in PUBLISHED.items() if "enable_thinking" in text][::4]
)
def test_a_default_renders_as_the_argument_of_published_templates(name: str) -> None:
    text, kwargs = PUBLISHED[name], {"enable_thinking": False}
    tokenizer, default = tokenizer_for(text), set_defaults(text, kwargs)
    for add_prompt in (False, True):
        options: Any = {"add_prompt": add_prompt, "message_format": MessageFormat()}
        expected = Renderer(tokenizer, text).apply_template(
            [Chat(TURNS * 2, (), kwargs)], **options
        )
        assert Renderer(tokenizer, default).apply_template([Chat(TURNS * 2)], **options) == expected


@pytest.mark.parametrize("name", ["tools", "add_generation_prompt", "return_dict", "a-b", "not"])
def test_names_that_are_no_arguments_are_refused(name: str) -> None:
    with pytest.raises(RowError, match=f"chat_template_kwargs: '{name}' is "):
        row(chat_template_kwargs={name: True})
    with pytest.raises(RowError, match="chat_template_kwargs is "):
        row(chat_template_kwargs=[name])
    config = DataConfig(chat_template_kwargs={name: True})
    assert any(
        problem.startswith(f"data.chat_template_kwargs: '{name}' is ")
        for problem in check_datasets(config)
    )
