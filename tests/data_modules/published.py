"""Chat templates published in an installed package, read as data without importing it."""

from __future__ import annotations

import re
from importlib import metadata
from typing import Any

from tests.data_modules.conftest import build_tokenizer

# What templates write as control tokens: angle brackets with bars, capitals in brackets, tags.
_CONTROL = re.compile(
    r"<[|\uff5c][^<>\s]{1,40}?[|\uff5c]>|<[|\uff5c]?[a-zA-Z_/]{2,30}[|\uff5c]?>|\[/?[A-Z_]{2,20}\]"
    r"|<[|\uff5c][^<>]{1,40}>"
)


def published_templates() -> dict[str, str]:
    """Return the templates that TRL ships, by name; empty if it is not installed."""
    try:
        files = metadata.files("trl") or []
    except metadata.PackageNotFoundError:
        return {}
    found = [file for file in files if file.parent.name == "chat_templates"]
    return {
        file.stem: file.read_text(encoding="utf-8") for file in found if file.suffix == ".jinja"
    }


PUBLISHED = {
    name: text for name, text in published_templates().items() if not name.endswith("_training")
}
"""the templates without `{% generation %}` blocks"""


def tokenizer_for(text: str, *, adds_bos: bool = False) -> Any:
    """Return a small tokenizer that has the control tokens of a template, and the template."""
    controls = [found[0] for found in _CONTROL.finditer(text)]
    if "'<|' + message['role']" in text:
        controls += ["<|system|>", "<|user|>", "<|assistant|>"]
    specials = list(dict.fromkeys(["<s>", "</s>", *controls]))
    tokenizer = build_tokenizer(specials, bos="<s>", eos="</s>", adds_bos=adds_bos)
    tokenizer.chat_template = text
    return tokenizer
