"""Named templates render what the published templates of their models render."""

from __future__ import annotations

import json
from typing import Any

import jinja2
import pytest

from data_modules.template import ChatTemplate
from data_modules.template.named_templates import named_template
from data_modules.types import Encoded
from tests.data_modules.conftest import build_tokenizer, items_of
from tests.data_modules.published import published_templates

TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "d", "parameters": {"type": "object"}},
}
CALL = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": {"a": 1}}}
SYSTEM, USER = {"role": "system", "content": "S"}, {"role": "user", "content": "U"}
ANSWER, AGAIN = {"role": "assistant", "content": "A"}, {"role": "user", "content": "V"}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "R", "tool_call_id": "call00001", "name": "look"}
TALK = [SYSTEM, USER, ANSWER, AGAIN]
WITH_TOOLS = [USER, CALLS, RESULT, ANSWER]
ROLE, END = "<|start_of_role|>", "<|end_of_role|>"
RENDERED = {
    "phi4": "<|im_start|>system<|im_sep|>S<|im_end|><|im_start|>user<|im_sep|>U<|im_end|>"
    "<|im_start|>assistant<|im_sep|>A<|im_end|><|im_start|>user<|im_sep|>V<|im_end|>"
    "<|im_start|>assistant<|im_sep|>",
    "mistral_v3": "<s>[INST] S\n\nU[/INST] A</s>[INST] V[/INST]",
    "mistral_v7": "<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]U[/INST]A</s>[INST]V[/INST]",
    "granite": f"{ROLE}system{END}S<|end_of_text|>\n{ROLE}user{END}U<|end_of_text|>\n"
    f"{ROLE}assistant{END}A<|end_of_text|>\n{ROLE}user{END}V<|end_of_text|>\n{ROLE}assistant{END}",
    "deepseek": "<s>S<｜User｜>U<｜Assistant｜>A<｜end▁of▁sentence｜><｜User｜>V<｜Assistant｜>",
}
RENDERED_CALLS = {
    "mistral_v3": f"<s>[AVAILABLE_TOOLS] [{json.dumps(TOOL)}][/AVAILABLE_TOOLS][INST] U[/INST]"
    '[TOOL_CALLS] [{"name": "look", "arguments": {"a": 1}, "id": "call00001"}]</s>'
    '[TOOL_RESULTS] {"content": R, "call_id": "call00001"}[/TOOL_RESULTS] A</s>',
    "granite": f"{ROLE}user{END}U<|end_of_text|>\n{ROLE}assistant{END}<tool_call>\n"
    '{"name": "look", "arguments": {"a": 1}}\n</tool_call><|end_of_text|>\n'
    f"{ROLE}user{END}\n<tool_response>\nR\n</tool_response><|end_of_text|>\n"
    f"{ROLE}assistant{END}A<|end_of_text|>\n",
    "deepseek": "<s><｜User｜>U<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function"
    '<｜tool▁sep｜>look\n```json\n{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    "<｜end▁of▁sentence｜><｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>R<｜tool▁output▁end｜>"
    "<｜tool▁outputs▁end｜>A<｜end▁of▁sentence｜>",
}
SAME_AS = {
    "gemma": "gemma3",
    "gemma4": "gemma4_v5",
    "harmony": "gptoss",
    "llama3_1": "llama3_1",
    "qwen3": "qwen3",
}
TAKEN = {
    "description": "What to take.",
    "type": "object",
    "properties": {
        "what": {"type": "string", "description": "one", "enum": ["a", "b"], "default": "a"},
        "many": {"type": "array", "items": {"type": "integer"}, "nullable": True},
        "each": {"type": "array", "items": {"type": "object", "required": ["x"]}},
        "from": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
        "open": {"type": "object", "description": "any", "additionalProperties": False},
        "last": {"type": "boolean", "default": True},
        "kind": {"oneOf": [{"type": "string", "description": "s"}, {"type": "integer"}]},
    },
    "required": ["what"],
}
TAKE = {"type": "function", "function": {"name": "take", "description": "d", "parameters": TAKEN}}
ARGUMENTS = {"what": "é<", "many": [1, True, None, 2.5], "from": {"x": {"b": "c"}}}
TAKES = {**CALLS, "tool_calls": [{**CALL, "function": {"name": "take", "arguments": ARGUMENTS}}]}
CHATS_WITH_TOOLS = [
    ([SYSTEM, USER], True),
    ([USER, TAKES], False),
    ([USER, TAKES, RESULT], True),
    ([USER, {**TAKES, "content": "look"}, RESULT, CALLS, RESULT, ANSWER, AGAIN], True),
    ([USER, {**TAKES, "reasoning": "r", "thinking": "r"}, RESULT, ANSWER], False),
    ([USER, {**TAKES, "reasoning": "r", "thinking": "r"}, RESULT], True),
    ([USER, {**ANSWER, "reasoning": "r", "thinking": "r"}], False),
    ([SYSTEM, USER, {**ANSWER, "reasoning": "r", "thinking": "r"}, AGAIN, ANSWER], False),
]
"""chats with tools, and whether a generation prompt follows"""


def rendered(text: str, messages: list[dict[str, Any]], **more: Any) -> str:
    tokenizer = build_tokenizer(["<s>", "</s>"], bos="<s>", eos="</s>")
    tokenizer.chat_template = text
    written: str = tokenizer.apply_chat_template(messages, tokenize=False, **more)
    return written


@pytest.mark.parametrize("name", RENDERED)
def test_conversations_with_and_without_calls(name: str) -> None:
    text = named_template(name)
    assert rendered(text, TALK, add_generation_prompt=True) == RENDERED[name]
    if name in RENDERED_CALLS:
        tools = {"tools": [TOOL]} if name == "mistral_v3" else {}
        assert rendered(text, WITH_TOOLS, **tools) == RENDERED_CALLS[name]


@pytest.mark.parametrize(
    ("input_", "context", "question"),
    [
        ("", "", "do it"),
        ("1 2", ", paired with an input that provides further context", "do it\n\n### Input:\n1 2"),
    ],
)
def test_alpaca_prompt_depends_on_an_input(input_: str, context: str, question: str) -> None:
    """The two prompts of stanford_alpaca's train.py, with a line break after the last header."""
    row = {"instruction": "do it", "input": input_, "output": "done"}
    items = items_of(row)
    template = ChatTemplate.resolve(build_tokenizer(["</s>"], eos="</s>"), "alpaca")
    (encoded,) = template.encode(items)
    assert isinstance(encoded, Encoded)
    ids, trained = encoded.input_ids, encoded.weights > 0
    assert template.tokenizer.decode(ids) == (
        f"Below is an instruction that describes a task{context}. Write a response that "
        f"appropriately completes the request.\n\n### Instruction:\n{question}\n\n"
        "### Response:\ndone</s>"
    )
    assert template.tokenizer.decode(ids[trained]) == "done</s>"
    prompt = template.prompt(items[0])
    assert prompt is not None and prompt.input_ids == ids[~trained].tolist()


def test_granite_declares_its_tools() -> None:
    written = rendered(named_template("granite"), [SYSTEM, USER], tools=[TOOL])
    assert written.startswith(f"{ROLE}system{END}S\n\nYou are a helpful assistant with access to ")
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in written


@pytest.mark.skipif(not published_templates(), reason="needs trl's templates")
@pytest.mark.parametrize("name", SAME_AS)
def test_chats_are_rendered_as_by_the_published_template(name: str) -> None:
    ours, theirs = named_template(name), published_templates()[SAME_AS[name]]
    chats = [([USER, ANSWER], False), (TALK, True)]
    chats += [(WITH_TOOLS, False)] if name in ("llama3_1", "qwen3") else []
    chats += CHATS_WITH_TOOLS if name in ("gemma4", "harmony") else []
    for messages, prompt in chats:
        for tools in ([TOOL, TAKE], [TOOL], None):
            more = {"tools": tools, "add_generation_prompt": prompt, "enable_thinking": prompt}
            assert rendered(ours, messages, **more) == rendered(theirs, messages, **more)


def test_harmony_allows_one_call_per_answer() -> None:
    twice = {**CALLS, "tool_calls": [CALL, CALL]}
    with pytest.raises(jinja2.TemplateError, match="one tool call per answer"):
        rendered(named_template("harmony"), [USER, twice])
