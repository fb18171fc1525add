"""The loss mask and the rendered text of common chat templates, and the errors of others."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template

from common.errors import DataError
from data_modules import TEMPLATE_NAMES, find_syntax_error
from data_modules.template import ChatTemplate, RowRefusedError
from data_modules.template.named_templates import named_template, syntax_error
from data_modules.types import Conversation, Document, Encoded, Item, Segment, Turn
from tests.data_modules.conftest import ORIGIN, build_tokenizer
from tests.data_modules.published import published_templates, tokenizer_for

IM = ("<|im_start|>", "<|im_end|>")
PLAIN, CHATML = named_template("plain"), named_template("chatml")
# The generation prompt opens a reasoning block that the whole conversation does not have, so the
# prompt is no prefix of the conversation; the number of turns makes their starts differ as well.
NO_PREFIX = (
    "{{ messages | length }} turns\n{% for m in messages %}"
    "<|im_start|>{{ m.role }}{{ '\n' }}{{ m.content }}<|im_end|>{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n<think>\n' }}{% endif %}"
)
# Without a generation prompt: the header of an answer is written with the answer.
NO_GENERATION_PROMPT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ '\n' }}{{ m.content }}<|im_end|>"
    "{{ '\n' }}{% endfor %}"
)
LOST = "does not write the answer `two`"
NO_STOP = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '\n' }}{% endfor %}"


def chat(*contents: str, weights: tuple[float | None, ...] = ()) -> Conversation:
    """Return a conversation of alternating user and assistant turns."""
    turns = []
    for index, content in enumerate(contents):
        weight = weights[index] if weights else None
        turns.append(Turn("assistant" if index % 2 else "user", content, weight))
    return Conversation(tuple(turns), ORIGIN)


TWO_ANSWERS = chat("yes, one or two?", "yes, one", "yes, one\nor two again", "two")


def template_of(text: str) -> ChatTemplate:
    """Resolve the template of a tokenizer whose chat template is `text`."""
    specials = ["<s>", "</s>", *IM, "<start_of_turn>", "<end_of_turn>"]
    tokenizer = build_tokenizer(specials, bos="<s>", eos="</s>")
    tokenizer.chat_template = text
    return ChatTemplate.resolve(tokenizer, None)


def encode(template: ChatTemplate, item: Item) -> Encoded:
    """Encode one item, without an error."""
    (encoded,) = template.encode([item])
    assert isinstance(encoded, Encoded), encoded
    return encoded


def problem(template: ChatTemplate, item: Item) -> str:
    """Encode one item, and return its error."""
    (found,) = template.encode([item])
    assert isinstance(found, RowRefusedError)
    return str(found)


def runs(template: ChatTemplate, item: Item) -> list[str]:
    """Return the texts of the trained runs of tokens of an item, whatever their weights."""
    return [text for is_trained, text in by_weight(template, item, bool) if is_trained]


def by_weight(
    template: ChatTemplate, item: Item, kind: Callable[[float], float] = float
) -> list[tuple[float, str]]:
    """Return the runs of tokens of one weight, or of one `kind` of weights, as (weight, text)."""
    encoded = encode(template, item)
    pairs = zip(map(kind, encoded.weights.tolist()), encoded.input_ids.tolist(), strict=True)
    return [
        (weight, template.tokenizer.decode([id_ for _, id_ in run]))
        for weight, run in groupby(pairs, itemgetter(0))
    ]


def text_of(template: ChatTemplate, item: Item) -> str:
    """Return the whole text of the model's input."""
    ids = encode(template, item).input_ids
    return str(template.tokenizer.decode(ids))


# Drops the marks by which answers are located.
ASCII_ONLY = NO_PREFIX.replace("m.content", "m.content.encode('ascii', 'ignore').decode()")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (NO_STOP, r"turn 2 \(assistant\): .* no stop token.*chat_template=plain"),
        (NO_PREFIX.replace("m.content", "m.content | upper"), LOST),
        (ASCII_ONLY, "so its answers cannot be located; set data.chat_template=plain"),
        # The text of a later turn is not taken for it.
        (NO_PREFIX.replace("m.content", "('-' if loop.index == 2 else m.content)"), LOST),
        ("{{ messages.__class__.__mro__ }}{{ messages.append(1) }}", "refuses this row"),
    ],
)
def test_row_that_the_template_cannot_render_is_an_error(text: str, expected: str) -> None:
    talk = chat("q", "two", "q", "two")
    assert re.search(expected, problem(template_of(text), talk))


def test_empty_answer_is_masked() -> None:
    template = template_of(CHATML)
    assert runs(template, chat("q", "", "q", "two")) == ["two<|im_end|>"]
    assert runs(template, chat("q", " ")) == []


@pytest.mark.parametrize(
    ("segments", "expected"),
    [
        ((("one two", 1.0),), [(1.0, "one two</s>")]),
        ((("one two</s>", 1.0),), [(1.0, "one two</s>")]),
        ((("what is it:", 0.0), ("", 1.0)), [(0.0, "what is it:</s>")]),
        # A token across a border belongs to the later segment.
        ((("one ", 0.0), ("two", 1.0)), [(0.0, "one"), (1.0, " two</s>")]),
        # A character of three tokens.
        (
            (("a \u2603", 1.0), ("b", 0.0), ("\u2603", 1.0)),
            [(1.0, "a \u2603"), (0.0, "b"), (1.0, "\u2603</s>")],
        ),
        (
            (("what is it:", 0.25), (" two", 1.0), ("?", 0.0)),
            [(0.25, "what is it:"), (1.0, " two"), (0.0, "?"), (1.0, "</s>")],
        ),
    ],
)
def test_a_document_keeps_the_weights_of_its_segments(
    segments: tuple[tuple[str, float], ...], expected: list[tuple[float, str]], tokenizer: Any
) -> None:
    template = ChatTemplate.resolve(tokenizer, None)
    item = Document(tuple(Segment(*segment) for segment in segments), ORIGIN)
    assert by_weight(template, item) == expected


def test_stop_token_need_not_be_marked_as_special(tokenizer: Any) -> None:
    import tokenizers

    ends = [
        tokenizers.AddedToken(text, special=False, normalized=False) for text in ("<end>", "  ")
    ]
    tokenizer.add_tokens(ends)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}<end>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    template = ChatTemplate.resolve(tokenizer, None)
    assert runs(template, chat("q", "two")) == ["two<end>"]
    tokenizer.chat_template = tokenizer.chat_template.replace("<end>", "  ")
    assert re.search(
        "no stop token", problem(ChatTemplate.resolve(tokenizer, None), chat("q", "two"))
    )


def test_prompt_of_a_document_ends_where_training_starts(tokenizer: Any) -> None:
    template = ChatTemplate.resolve(tokenizer, None)
    item = Document((Segment("what is it: ", 0.0), Segment("two", 1.0)), ORIGIN)
    prompt = template.prompt(item)
    assert prompt is not None and prompt.answer == "two"
    # The space is the start of the token " two", which the model is trained to generate.
    assert tokenizer.decode(prompt.input_ids) == "what is it:"
    encoded = encode(template, item)
    ids, weights = encoded.input_ids, encoded.weights
    assert prompt.input_ids == ids[: weights.nonzero()[0][0]].tolist()
    assert template.prompt(Document((Segment("one", 1.0),), ORIGIN)) is None
    assert template.prompt(Document((Segment("", 0.0), Segment("one", 1.0)), ORIGIN)) is None


def test_tokenizer_without_template_gets_plain_with_a_note(tokenizer: Any) -> None:
    template = ChatTemplate.resolve(tokenizer, None)
    assert "plain" in template.note and "because the tokenizer has none" in template.note
    assert tokenizer.chat_template == PLAIN
    # Nothing after the last trained token is kept.
    assert text_of(template, chat("q", "a", "r", "b", "no answer")) == (
        "### User:\nq\n\n### Assistant:\na</s>\n\n### User:\nr\n\n### Assistant:\nb</s>"
    )


def test_template_file(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(
        "{% for m in messages %}{{ m.role }} {{ m.content }}{{ eos_token }}{% endfor %}"
    )
    template = ChatTemplate.resolve(tokenizer, str(file))
    assert text_of(template, chat("q", "a")) == "user q</s>assistant a</s>"
    assert runs(template, chat("q", "a"))[0].strip() == "a</s>"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("chatmll", None, ".*plain"),
        ("chatml", None, ".*plain"),
        ("missing.jinja", None, ".*plain"),
        ("t.jinja", b"{% for m in messages %}\n{{ m.content", "is not a valid template: line 2: "),
        ("t.jinja", b"\xff", "not UTF-8 text"),
        ("t.jinja", b" " * (1 << 20) + b"x", "1,048,577 bytes, too large for a chat template"),
    ],
)
def test_what_is_no_template_is_an_error(
    name: str,
    content: bytes | None,
    expected: str,
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(name).write_bytes(content)
    with pytest.raises(DataError, match=rf"chat_template={name}:? {expected}"):
        ChatTemplate.resolve(tokenizer, name)


def test_truncation_of_the_tokenizer_is_switched_off(tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=99)
    template = ChatTemplate.resolve(tokenizer, None)
    assert text_of(template, chat("q", "two")) == "### User:\nq\n\n### Assistant:\ntwo</s>"


def parsed(text: str) -> str | None:
    """Return what transformers says of a template's syntax, in our words."""
    try:
        _compile_jinja_template(text)
    except jinja2.TemplateAssertionError:
        return None  # an unknown filter or test, which only compiling finds
    except jinja2.TemplateSyntaxError as error:
        return syntax_error("it", error)
    return None


TEMPLATES = [*(named_template(name) for name in TEMPLATE_NAMES), *published_templates().values()]


@pytest.mark.parametrize("text", TEMPLATES[::12])
def test_a_template_is_valid_or_damaged_as_transformers_says(text: str) -> None:
    numbers = random.Random(text)
    assert find_syntax_error("it", text) is None
    start = numbers.randrange(len(text))
    damaged = text[:start] + text[start + numbers.randint(1, 40) :]
    tags = ("{% generation %}{% endgeneration %}", "{% generation %}", "{% unheard %}")
    for changed in (damaged, *tags):
        assert find_syntax_error("it", changed) == parsed(changed)


def test_nothing_is_computed() -> None:
    for text in ("{{ 9 ** 9 ** 9 }}", "{{ 'a' * 10 ** 12 }}", "{" * 40_000):
        assert find_syntax_error("it", text) is None


@pytest.mark.parametrize(
    "text", ["{% break %}", "{{ a | unheard }}", "{% for a in b %}" * 30 + "{% endfor %}" * 30]
)
def test_code_that_cannot_be_compiled(text: str) -> None:
    tokenizer = tokenizer_for(text)
    with pytest.raises(DataError, match="own chat template is not a valid template: "):
        ChatTemplate.resolve(tokenizer, None)
