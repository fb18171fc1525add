"""The tokens of a conversation: the same in training, in chat, and as others load the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from app.evaluation.conversation import check_served_tokens
from data_modules import TEMPLATE_NAMES, ChatTemplate
from data_modules.template.named_templates import _NEEDED
from tests.tiny import TINY_BASE

EVERY_DAY = ("chatml", "t5")


def exported(name: str, folder: Path, **how: Any) -> tuple[ChatTemplate, Any]:
    """A template of training, and the tokenizer that it leaves, as others load it."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_BASE)
    tokenizer.chat_template = None
    tokenizer.add_tokens(list(_NEEDED[name]), special_tokens=True)
    template = ChatTemplate.resolve(tokenizer, name, **how)
    tokenizer.save_pretrained(folder)
    return template, AutoTokenizer.from_pretrained(folder)


def check_template(name: str, folder: Path) -> None:
    template, tokenizer = exported(name, folder, is_encoder_decoder=name == "t5")
    assert check_served_tokens(template, tokenizer) == []


@pytest.mark.parametrize("name", EVERY_DAY)
def test_training_chat_and_export_agree(name: str, tmp_path: Path) -> None:
    check_template(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(TEMPLATE_NAMES) - set(EVERY_DAY)))
def test_every_template_by_name_agrees(name: str, tmp_path: Path) -> None:
    check_template(name, tmp_path)


def test_a_tokenizer_that_lost_its_template_is_named(tmp_path: Path) -> None:
    template, tokenizer = exported("plain", tmp_path)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    problems = check_served_tokens(template, tokenizer)
    assert len(problems) == 3 and all("the exported tokenizer renders" in one for one in problems)
