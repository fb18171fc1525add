"""The tokens of training are those of the saved tokenizer's chat template, with one BOS."""

from __future__ import annotations

import datetime
import hashlib
from pathlib import Path
from typing import Any

import pytest

from data_modules.template import ChatTemplate
from data_modules.template.named_templates import named_template
from data_modules.types import Conversation, Document, Segment, Turn
from tests.data_modules.conftest import ORIGIN, build_tokenizer
from tests.data_modules.published import tokenizer_for
from tests.data_modules.test_template import chat, encode, text_of

TURNS = (
    "{% for m in messages %}{{ m.role + ':\n' + m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}"
)
TEMPLATES = {
    **{name: named_template(name) for name in ("llama3", "mistral", "gemma", "qwen3")},
    "turns": TURNS,
    "newline": f"\n\n{TURNS}\n",
    "blanks before a block": f"  {TURNS}",
    "newline and blanks before a block": f"\n   {TURNS}\r\n",
    "blanks before text": f"  to {TURNS}",
    "blanks that stay": "  {%+ if true %}" + TURNS + "{% endif %}  ",
    "whitespace control": f"  \n {{%- set x = 1 -%}} \n {TURNS}",
    "BOS only with a system turn": "{% if messages[0].role == 'system' %}{{ bos_token }}"
    + "{% endif %}"
    + TURNS,
    "text of the BOS only with a system turn": "  {% if messages[0].role == 'system' %}<s>"
    "{% endif %}\n\n " + TURNS + " \n\n",
    "BOS only with a system turn, blanks at the end": "{% if messages[0].role == 'system' %}"
    "{{ bos_token }}{% endif %}" + TURNS + "x\n  ",
    "macro": "{% set sep = ':\n' %}{% macro one(m) %}{{ m.role + sep + m.content }}{{ eos_token }}"
    "{% endmacro %}{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{{ one(m) }}{% endfor %}{% if messages[0].role == 'system' and bos_token %}{% endif %}"
    "{% if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}",
    "not in prompts": "{% if not add_generation_prompt %}{{ bos_token }}{% endif %}" + TURNS,
}
TALK = chat("yes, one?", "yes", "one two", "two")
SYSTEM = Conversation((Turn("system", "be brief"), *TALK.turns), ORIGIN)


def messages(item: Conversation) -> list[dict[str, str]]:
    return [{"role": turn.role, "content": turn.content} for turn in item.turns]


def chat_tokens(tokenizer: Any, item: Conversation, prompt: bool = False) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(
        messages(item), add_generation_prompt=prompt, return_dict=False
    )
    return ids


CASES = [
    *((name, True) for name in (*TEMPLATES, "= llama2", "= mistral_v3", "= phi4")),
    *((name, False) for name in ("llama3", "turns", "= llama2")),
]


@pytest.mark.parametrize(("template_name", "adds_bos"), CASES)
def test_tokens_are_those_of_the_saved_tokenizer(
    template_name: str, adds_bos: bool, tmp_path: Path
) -> None:
    import transformers

    named = template_name.removeprefix("= ") if template_name.startswith("=") else None
    original = None if named else TEMPLATES[template_name]
    tokenizer = tokenizer_for(original or named_template(str(named)), adds_bos=adds_bos)
    tokenizer.chat_template = original
    before = tokenizer.apply_chat_template(messages(TALK), tokenize=False) if original else ""
    template = ChatTemplate.resolve(tokenizer, named)
    tokenizer.save_pretrained(tmp_path)
    saved = transformers.AutoTokenizer.from_pretrained(tmp_path)

    assert template.text == tokenizer.chat_template
    assert template.hash == hashlib.sha256(tokenizer.chat_template.encode()).hexdigest()
    bos = tokenizer.bos_token_id
    for item in (TALK, SYSTEM):
        ids = encode(template, item).input_ids.tolist()
        prompt = template.prompt(item)
        question = Conversation(item.turns[:-1], ORIGIN)
        assert prompt is not None
        for other in (tokenizer, saved):
            expected = chat_tokens(other, item)
            assert ids == expected[: len(ids)]
            assert prompt.input_ids == chat_tokens(other, question, prompt=True)
        if adds_bos and named != "llama2":
            assert ids[0] == bos and ids.count(bos) == 1
            assert prompt.input_ids[0] == bos and prompt.input_ids.count(bos) == 1
    if original:
        # Nothing but the BOS is changed.
        after = tokenizer.apply_chat_template(messages(TALK), tokenize=False)
        adds = adds_bos and not before.startswith("<s>")
        assert after == ("<s>" if adds else "") + before
        written = adds_bos and template_name not in ("llama3", "mistral", "gemma")
        assert (template.text != original) == written == ("start with `<s>`" in template.note)

    again = ChatTemplate.resolve(saved, None)
    assert again.note == "chat template: the tokenizer's"
    assert again.text == saved.chat_template
    assert encode(again, TALK).input_ids.tolist() == encode(template, TALK).input_ids.tolist()


@pytest.mark.parametrize("adds_bos", [True, False])
def test_documents_start_as_texts_of_the_tokenizer_do(adds_bos: bool) -> None:
    tokenizer = build_tokenizer(["<s>", "</s>"], bos="<s>", eos="</s>", adds_bos=adds_bos)
    template = ChatTemplate.resolve(tokenizer, None)
    item = Document((Segment("what: ", 0.0), Segment("one two", 1.0)), ORIGIN)
    expected = [*tokenizer("what: one two")["input_ids"], tokenizer.eos_token_id]
    assert encode(template, item).input_ids.tolist() == expected
    prompt = template.prompt(item)
    assert prompt is not None and prompt.input_ids == expected[: len(prompt.input_ids)]
    assert template.bos_token_id == (tokenizer.bos_token_id if adds_bos else None)
    with_bos = Document((Segment("<s>one", 1.0),), ORIGIN)
    assert encode(template, with_bos).input_ids.tolist().count(tokenizer.bos_token_id) == 1


def test_date_key_of_a_template_that_writes_the_date(tokenizer: Any) -> None:
    assert ChatTemplate.resolve(tokenizer, "plain").date_key == ""
    tokenizer.chat_template = "{{ strftime_now('%Y-%m-%d') }}\n" + TURNS
    template = ChatTemplate.resolve(tokenizer, None)
    assert template.date_key == datetime.date.today().isoformat()
    assert text_of(template, TALK).startswith(template.date_key)
