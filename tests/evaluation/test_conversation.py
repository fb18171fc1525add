"""A conversation has the same tokens in training, chat, and the exported tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from app.evaluation.conversation import (
    ConversationConfig,
    Reply,
    Responder,
    check_served_tokens,
)
from data_modules import TEMPLATE_NAMES, ChatTemplate
from data_modules.template.named_templates import _NEEDED
from tests.tiny import TINY_BASE

EVERY_DAY = ("chatml", "t5")


def exported(name: str, folder: Path, **how: Any) -> tuple[ChatTemplate, Any]:
    """A chat template as in training, and the exported tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_BASE)
    tokenizer.chat_template = None
    tokenizer.add_tokens(list(_NEEDED[name]), special_tokens=True)
    template = ChatTemplate.resolve(tokenizer, name, **how)
    tokenizer.save_pretrained(folder)
    return template, AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in EVERY_DAY else pytest.mark.slow)
        for name in sorted(TEMPLATE_NAMES)
    ],
)
def test_training_chat_and_export_give_equal_tokens(name: str, tmp_path: Path) -> None:
    template, tokenizer = exported(name, tmp_path, is_encoder_decoder=name == "t5")
    assert check_served_tokens(template, tokenizer) == []


def test_a_changed_template_is_reported(tmp_path: Path) -> None:
    template, tokenizer = exported("plain", tmp_path)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    problems = check_served_tokens(template, tokenizer)
    assert len(problems) == 3 and all("the exported tokenizer renders" in one for one in problems)


def test_an_answer_has_the_spaces_that_were_generated_each_piece_once() -> None:
    """Tokenizers of T5's kind may be set to remove them, from pieces that were shown already."""
    pieces = {"<unk>": 0.0, "\u2581": -2.0} | dict.fromkeys("[1,2]don't", -1.0)
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram([*pieces.items()], unk_id=0))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    backend.decoder = tokenizers.decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True)
    text = "[1 , 2] do n't , 1"
    assert tokenizer.decode(tokenizer.encode(text)) == "[1, 2] don't, 1"

    class Scripted(Responder):
        def _tokens(self, *_: Any) -> Iterator[int]:
            yield from tokenizer.encode(text)

    model: Any = SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=False))
    template: Any = None
    responder = Scripted(model, tokenizer, template, set())
    answer = list(responder.answer(Reply([1]), ConversationConfig()))
    assert "".join(answer) == text and len(answer) > 10
    # The space by which a text goes on is dropped in a chat, and kept in a completion.
    for continues, start in ((False, ""), (True, " ")):
        reply = Reply(tokenizer.encode("do"), continues_text=continues)
        answer = list(responder.answer(reply, ConversationConfig()))
        assert "".join(answer) == start + text
