"""`train_detail` of a turn: the characters that it names are trained on, and no others."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_modules.format import RowError
from data_modules.template import ChatTemplate, UnusableTemplateError
from data_modules.types import Conversation, Turn
from tests.data_modules.conftest import ORIGIN, items_of
from tests.data_modules.test_template import encode, template_of
from tests.data_modules.test_template_reasoning import TEMPLATES
from tests.data_modules.test_template_reasoning import template_of as template_named

ASK = {"role": "user", "content": "what is it called"}
TEXT = "it is one, no the answer is two three"
CALL = {"function": {"name": "look", "arguments": {"x": 1}}}
UPPER = "{% for m in messages %}{{ m.role }}: {{ m.content | upper }}</s>{% endfor %}"


def entry(begin: Any, end: Any, train: Any = True) -> dict[str, Any]:
    return {"begin_offset": begin, "end_offset": end, "train": train}


def row(form: str, details: Any, **keys: Any) -> dict[str, Any]:
    answer = {"role": "assistant", "content": TEXT, "train_detail": details, **keys}
    message = {**answer, "text": answer["content"]}
    return {
        "messages": {"messages": [ASK, answer]},
        "sharegpt": {"conversations": [ASK, answer]},
        "prompt_completion": {"prompt": [ASK], "completion": [answer]},
        "oasst": {"prompt": {"role": "prompter", "text": "q", "replies": [message]}},
    }[form]


def convert(form: str, details: Any, **keys: Any) -> Conversation:
    (item,) = items_of(row(form, details, **keys), form)
    assert isinstance(item, Conversation)
    return item


def trained_words(template: ChatTemplate, chat: Conversation) -> list[tuple[str, float]]:
    encoded = encode(template, chat)
    texts = map(template.tokenizer.decode, encoded.input_ids.tolist())
    return list(zip(texts, encoded.weights.tolist(), strict=True))


FORMS = ("messages", "sharegpt", "prompt_completion", "oasst")


@pytest.mark.parametrize("form", FORMS)
def test_characters_without_an_entry_are_not_trained_and_the_turn_keeps_its_weight(
    form: str,
) -> None:
    details = [entry(0, 8), entry(9, 12, False), entry(13, 35, 1)]
    turn = convert(form, details).turns[-1]
    assert (turn.trained, turn.weight) == (((0, 9), (13, 36)), 1.0)
    assert convert(form, details, weight=0.5).turns[-1].weight == 0.5
    assert convert(form, details, train=False).turns[-1].weight == 0.0
    assert convert(form, [entry(0, 8, False)]).turns[-1].weight == 0.0
    for nothing in (None, [], ""):
        turn = convert(form, nothing).turns[-1]
        assert (turn.trained, turn.weight) == (None, None)


@pytest.mark.parametrize(
    ("details", "said"),
    [
        ("all", "is str all, not a list of {begin_offset: 0, end"),
        ([{"begin_offset": 0, "end_offset": 1}], r"\[0\] has \['begin_offset', 'end_offset'\]"),
        ([entry("0", 1)], r"\[0\].begin_offset is '0'; give the number of a character"),
        ([entry(0, 1, "yes")], r"\[0\].train is 'yes'; give true or false"),
        ([entry(0, 37)], r"\[0\] is characters 0 to 37; expected offsets from 0 to 36"),
        ([entry(0, 4), entry(4, 9)], r"\[1\] is characters 4 to 9; expected offsets from 5 to"),
        ([entry(5, 9), entry(0, 4)], r"\[1\] is characters 0 to 4; expected offsets from 10 to"),
    ],
)
def test_an_entry_that_cannot_be_followed_is_refused(details: Any, said: str) -> None:
    with pytest.raises(RowError, match=f"train_detail ?{said}"):
        convert("messages", details)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"content": [{"type": "text", "text": TEXT}]}, r"counts characters .* content is list"),
        ({"tool_calls": [CALL]}, r"characters of an answer, but this is one with a tool call"),
        ({"role": "user"}, r"but this is a user turn; set 'train'"),
        ({"role": "system"}, r"but this is a system turn"),
    ],
)
def test_what_has_no_characters_of_an_answer_is_refused(keys: dict[str, Any], said: str) -> None:
    turns = [{**row("messages", [entry(0, 8)])["messages"][1], **keys}]
    turns = turns if keys.get("role") == "system" else [ASK, *turns]
    with pytest.raises(RowError, match=rf"^messages\[\d\].train_detail .*{said}"):
        items_of({"messages": turns})
    segment = {"text": TEXT, "train_detail": [entry(0, 8)]}
    with pytest.raises(RowError, match=r"segments\[0\].train_detail .*this is a segment"):
        items_of({"segments": [segment]})


def test_turns_with_details_are_not_joined() -> None:
    answer = row("messages", [entry(0, 1)])["messages"][1]
    for pair in ([answer, answer], [answer, {**ASK, "role": "assistant", "weight": 1.0}]):
        (item,) = items_of({"messages": [ASK, *pair]})
        assert isinstance(item, Conversation) and len(item.turns) == 3


KEYS: tuple[dict[str, Any], ...] = ({}, {"reasoning": TEXT}, {"content": f"{TEXT}\n"})


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_trains_the_named_characters_and_the_stop(name: str) -> None:
    """`it is one`, ` the answer`, and the stop token, wherever the template writes the answer."""
    template = template_named(name, "keep")
    if template.is_encoder_decoder:
        pytest.skip("for causal models")
    keys = KEYS[zlib.crc32(name.encode()) % 3]
    whole = trained_words(template, convert("messages", None, **keys))
    words = trained_words(template, convert("messages", [entry(0, 8), entry(14, 23)], **keys))
    assert [word for word, _ in words] == [word for word, _ in whole]
    trained = "".join(word if weight else "\0" for word, weight in words)
    parts = [part for part in trained.split("\0") if part]
    assert [part.strip() for part in parts[:2]] == ["it is one", "the answer"], parts
    stop = "".join(word for word, _ in whole).rpartition(TEXT)[2]
    assert stop.strip() and "".join(parts[2:]).strip() == stop.strip()


TEXTS = st.text(alphabet="ab \n\u00e9\U0001f600t", min_size=1, max_size=24)


@settings(max_examples=150)
@given(TEXTS.filter(str.strip), st.data())
def test_a_token_is_trained_if_all_its_characters_are_and_with_a_word_the_blank_before_it(
    text: str, data: st.DataObject
) -> None:
    """Against an oracle of single characters, on tokens of several characters and of parts."""
    borders = sorted(data.draw(st.sets(st.integers(0, len(text)), min_size=2, max_size=6)))
    pieces = list(zip(borders[::2], borders[1::2], strict=False))
    chat = Conversation(
        (Turn("user", "a"), Turn("assistant", text, 1.0, trained=tuple(pieces))), ORIGIN
    )
    template = CHATML
    encoded = encode(template, chat)
    decoder = template.tokenizer.backend_tokenizer
    rendered = f"<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n{text}<|im_end|>"
    offsets = decoder.encode(rendered, add_special_tokens=False).offsets
    first = len(rendered) - len("<|im_end|>") - len(text)
    trained = {first + n for begin, end in pieces for n in range(begin, end)}
    trained |= {n - 1 for n in trained if rendered[n - 1] == " " and not rendered[n].isspace()}
    trained.add(first + len(text))  # the stop
    expected = [
        float(trained.issuperset(range(start, min(end, first + len(text) + 1))))
        for start, end in offsets
    ]
    assert encoded.weights.tolist() == expected


CHATML = template_named("named:chatml", "keep")


def test_an_answer_that_is_not_written_unchanged_is_refused() -> None:
    chat = Conversation(
        (Turn("user", "a"), Turn("assistant", "b </think> c", trained=((0, 3),))), ORIGIN
    )
    (found,) = template_of(UPPER.replace(" | upper", ".split('</think>')[-1]")).encode([chat])
    assert isinstance(found, UnusableTemplateError)
    assert str(found).startswith("turn 2 (assistant): the chat template does not")
    assert "train_detail cannot be located; set 'train' for the whole turn" in str(found)
