"""Suggest the settings by which a row whose format is not recognized can be read.

Decides by the names of its columns and by what stands in them. Never reads a row as a format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_QUESTIONS = ("instruction", "question", "query", "problem", "prompt", "input", "user", "human")
_ANSWERS = (
    *("output", "answer", "response", "completion", "solution", "answers", "target", "reply"),
    *("assistant", "gpt", "summary"),
)
_EXTRAS = ("input", "context", "passage")
_TEXTS = ("text", "content", "body", "document", "article", "code", "markdown")
_ROLE_NAMES = ("role", "from")
_DEPTH = 3


def suggest_settings(values: Mapping[str, Any]) -> str:
    """Return format and columns to set, as in `format: alpaca, columns: {instruction: question}`.

    "" where nothing in the row looks like one; `values` are those of such a row.
    """
    for name, value in values.items():
        if _is_turns(value):
            return f"format: messages, columns: {{messages: {name}}}"
    question = _find(values, _QUESTIONS)
    answer = _find(values, _ANSWERS, but=question) or _find_inside(values, _ANSWERS)
    if question and answer:
        extra = _find(values, _EXTRAS, but=question)
        if not extra and "." in answer:
            extra = _beside(values, answer)
        columns = {"instruction": question, "input": extra, "output": answer}
        named = [f"{field}: {path}" for field, path in columns.items() if path not in ("", field)]
        return f"format: alpaca, columns: {{{', '.join(named)}}}"
    texts = [name for name, value in values.items() if isinstance(value, str)]
    text = _find(values, _TEXTS) or (texts[0] if len(texts) == 1 and not answer else "")
    return f"format: completion, columns: {{text: {text}}}" if text and not question else ""


def _is_turns(value: Any) -> bool:
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and any(name in first for name in _ROLE_NAMES)


def _find(values: Mapping[str, Any], names: Sequence[str], but: str = "") -> str:
    """Return the path to the text under the first of `names`, "" where there is none."""
    for known in names:
        for name in values:
            if name.lower() == known and name != but.split(".")[0]:
                path = _text_in(values[name], name, (*_ANSWERS, *_TEXTS))
                if path:
                    return path
    return ""


def _find_inside(values: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the path to a text under one of `names` in a list or an object."""
    for name, value in values.items():
        if isinstance(value, (list, dict)) and (path := _text_in(value, name, names)):
            return path
    return ""


def _text_in(value: Any, path: str, names: Sequence[str], depth: int = 0) -> str:
    if isinstance(value, str):
        return path if depth or value.strip() else ""
    if depth == _DEPTH:
        return ""
    if isinstance(value, list):
        return _text_in(value[0], f"{path}.0", names, depth + 1) if value else ""
    if isinstance(value, dict):
        for name in names:
            if found := _text_in(value.get(name), f"{path}.{name}", names, depth + 1):
                return found
    return ""


def _beside(values: Mapping[str, Any], answer: str) -> str:
    """Return the path to an `input` in the same object as a nested answer."""
    found: Any = values
    *steps, _ = answer.split(".")
    for step in steps:
        found = found[int(step)] if isinstance(found, list) else found[step]
    has_input = isinstance(found, dict) and isinstance(found.get("input"), str)
    return ".".join([*steps, "input"]) if has_input else ""
