"""Syntax errors of templates are those that transformers finds, in every published template."""

from __future__ import annotations

import random

import jinja2
import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template

from common.errors import DataError
from data_modules import TEMPLATE_NAMES, ChatTemplate, find_syntax_error
from data_modules.template.named_templates import named_template, syntax_error
from tests.data_modules.published import published_templates, tokenizer_for

TEMPLATES = {name: named_template(name) for name in TEMPLATE_NAMES} | published_templates()
DAMAGES = 1


def parsed(text: str) -> str | None:
    """Return what transformers says of a template's syntax, in our words."""
    try:
        _compile_jinja_template(text)
    except jinja2.TemplateAssertionError:
        return None  # an unknown filter or test, which only compiling finds
    except jinja2.TemplateSyntaxError as error:
        return syntax_error("it", error)
    return None


@pytest.mark.parametrize("name", [*TEMPLATE_NAMES, *list(published_templates())[::4]])
def test_a_template_is_valid_or_damaged_as_transformers_says(name: str) -> None:
    text, numbers = TEMPLATES[name], random.Random(name)
    assert find_syntax_error("it", text) is None
    for _ in range(DAMAGES):
        start = numbers.randrange(len(text))
        damaged = text[:start] + text[start + numbers.randint(1, 40) :]
        assert find_syntax_error("it", damaged) == parsed(damaged)


def test_tags() -> None:
    for text in ("{% generation %}{% endgeneration %}", "{% generation %}", "{% unheard %}"):
        assert find_syntax_error("it", text) == parsed(text), text


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
