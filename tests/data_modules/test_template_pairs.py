"""Encoder-decoder models: the tokens of the encoder and the targets of the decoder."""

from __future__ import annotations

import re
from typing import Any

import pytest

from data_modules.template import ChatTemplate, MaskConfig
from data_modules.types import Conversation, Document, Note, Segment, Tokens, Turn
from tests.data_modules.conftest import ORIGIN, build_tokenizer
from tests.data_modules.test_template import encode, problem

CHAT = Conversation(
    (
        *(Turn("user", "one"), Turn("assistant", "two")),
        *(Turn("user", "three"), Turn("assistant", "what is it", 0.5)),
    ),
    ORIGIN,
    weight=0.5,
)
PROMPTED = Document((Segment("what is it: ", 0.0), Segment("yes", 0.25)), ORIGIN)


def build(single: str, **special: str) -> Any:
    """Build a tokenizer that encodes a text as `single`, with these special tokens."""
    import tokenizers

    tokenizer = build_tokenizer(["<pad>", *special.values()], **special)
    backend = tokenizer.backend_tokenizer
    tokens = [(text, backend.token_to_id(text)) for text in special.values()]
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=single, special_tokens=tokens
    )
    return tokenizer


def t5_like() -> Any:
    return build("$A </s>", eos="</s>")


def bart_like() -> Any:
    return build("<s> $A </s>", bos="<s>", eos="</s>")


def resolve(tokenizer: Any, **mask: Any) -> ChatTemplate:
    return ChatTemplate.resolve(tokenizer, None, MaskConfig(**mask), is_encoder_decoder=True)


@pytest.mark.parametrize("make", [t5_like, bart_like])
@pytest.mark.parametrize(
    ("item", "source", "target"),
    [(CHAT, "one\ntwo</s>\nthree", "what is it"), (PROMPTED, "what is it: ", "yes")],
)
def test_the_last_answer_is_the_target(make: Any, item: Any, source: str, target: str) -> None:
    tokenizer = make()
    template = resolve(tokenizer)
    encoded = encode(template, item)
    assert encoded.target_ids is not None
    assert encoded.input_ids.tolist() == tokenizer(source)["input_ids"]
    assert encoded.target_ids.tolist() == tokenizer(text_target=target)["input_ids"]
    assert encoded.weights.tolist() == [0.25] * len(encoded.target_ids)
    prompt = template.prompt(item)
    assert prompt is not None and prompt.answer == target
    assert prompt.input_ids == encoded.input_ids.tolist()


def test_a_target_ends_with_eos_if_the_tokenizer_adds_none() -> None:
    tokenizer = build_tokenizer(["</s>"], eos="</s>")
    encoded = encode(resolve(tokenizer), PROMPTED)
    assert encoded.target_ids is not None
    assert encoded.target_ids.tolist()[-1] == tokenizer.eos_token_id
    assert encoded.weights[-1] == 0.25
    assert tokenizer.eos_token_id not in encoded.input_ids
    no_stop = encode(resolve(tokenizer, train_on_eos="none"), PROMPTED)
    assert no_stop.weights[-1] == 0 and no_stop.weights[0] == 0.25
    blank = Conversation((Turn("user", "q"), Turn("assistant", " ")), ORIGIN)
    assert not encode(resolve(tokenizer), blank).weights.any()


def test_tokenizer_without_template_gets_contents_only_with_a_note() -> None:
    tokenizer = t5_like()
    template = resolve(tokenizer)
    assert "t5" in template.note and "because the tokenizer has none" in template.note
    named = ChatTemplate.resolve(tokenizer, "plain", is_encoder_decoder=True)
    prompt = named.prompt(CHAT)
    assert prompt is not None
    assert tokenizer.decode(prompt.input_ids).startswith("### User:\none\n\n### Assistant:\ntwo")
    assert tokenizer.decode(prompt.input_ids).endswith("### Assistant:\n</s>")


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (Document((Segment("one two", 1.0),), ORIGIN), "needs a prompt and an answer.*one text"),
        (Document((Segment("", 0.0), Segment("one", 1.0)), ORIGIN), "needs a prompt"),
        (Conversation((Turn("user", "one"),), ORIGIN), "needs a prompt.*no answer"),
        (Tokens((1, 2), (1.0, 1.0), ORIGIN), "needs a prompt.*already tokenized"),
    ],
)
def test_rows_without_source_or_target_are_an_error(item: Any, expected: str) -> None:
    template = resolve(t5_like())
    assert re.match(f"an encoder-decoder model {expected}", problem(template, item))
    assert template.prompt(item) is None
    kinds = [type(found).__name__ for found in template.encode([PROMPTED, item, CHAT])]
    assert kinds == ["Encoded", "RowRefusedError", "Encoded"]


def test_reasoning_of_the_target_is_kept_masked_or_stripped() -> None:
    chat = Conversation((Turn("user", "q"), Turn("assistant", "yes", reasoning="one two")), ORIGIN)
    tokenizer = t5_like()
    trained = {}
    for reasoning in ("keep", "mask", "strip"):
        encoded = encode(resolve(tokenizer, reasoning=reasoning), chat)
        assert encoded.target_ids is not None
        trained[reasoning] = tokenizer.decode(encoded.target_ids[encoded.weights > 0])
        seen = tokenizer.decode(encoded.target_ids)
        assert (seen == "<think>\none two\n</think>\n\nyes</s>") == (reasoning != "strip")
    assert trained == {
        "keep": "<think>\none two\n</think>\n\nyes</s>",
        "mask": "yes</s>",
        "strip": "yes</s>",
    }


def test_a_lost_system_turn_is_noted() -> None:
    tokenizer = t5_like()
    chat = Conversation((Turn("system", "be brief"), *CHAT.turns), ORIGIN)
    assert encode(resolve(tokenizer), chat).notes == ()
    tokenizer.chat_template = "{% for m in messages[1:] %}{{ m.content }}{% endfor %}"
    assert encode(resolve(tokenizer), chat).notes == (Note("lost_system"),)
