"""Read the reasoning of an answer, wherever a row has it: in a field, or in tags in the text.

The only reader of `<think>` tags. A template that reads a field gets reasoning from tags in that
field; for any other, reasoning from a field is put into tags before the text.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

from data_modules.types import Turn

OPENING, CLOSING = "<think>", "</think>"
_BLOCK = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
_LINES = re.compile(r"\A(?:\s*\n|[^\S\n]*)")
"""white space before a text, except the indentation of its first line"""
_QUOTES = tuple("`'\"\u2018\u2019\u201c\u201d")


class TaggedText(NamedTuple):
    """A content that starts with reasoning in tags; its parts, joined, are the content.

    `reasoning` and `answer` have no surrounding white space. `opening` is white space if the row
    has the closing tag alone, as text that a model wrote after a prompt with the opening tag.
    """

    opening: str
    reasoning: str
    closing: str
    answer: str
    end: str


def split_reasoning(content: str) -> TaggedText | None:
    """Split a content that starts with reasoning in tags; None for any other."""
    at = content.find(CLOSING)
    if at < 0:
        return None
    first = at - len(content[:at].lstrip())
    has_opening = content.startswith(OPENING, first)
    if not has_opening and (OPENING in content[:at] or _is_quoted(content, at)):
        return None
    start = first + len(OPENING) if has_opening else first
    reasoning, answer = content[start:at].strip(), content[at + len(CLOSING) :].strip()
    start += len(content[start:at]) - len(content[start:at].lstrip()) if reasoning else 0
    after = len(content.rstrip()) - len(answer)
    return TaggedText(
        content[:start],
        reasoning,
        content[start + len(reasoning) : after],
        answer,
        content[after + len(answer) :],
    )


def _is_quoted(content: str, at: int) -> bool:
    """Return whether a text mentions the tag at this place instead of ending reasoning there."""
    end = at + len(CLOSING)
    return content[at - 1 : at] in _QUOTES and content[end : end + 1] in _QUOTES


def move_to_field(turn: Turn) -> Turn:
    """Return an answer whose reasoning, if it has any, is all in its field.

    An answer with other tags gets an empty field, so that the template does not look for reasoning.
    """
    parts = split_reasoning(turn.content)
    if parts is None:
        return replace(turn, reasoning="") if turn.reasoning is None else turn
    text = turn.content[turn.content.index(CLOSING) + len(CLOSING) :]
    return replace(turn, content=_LINES.sub("", text), reasoning=_joined(turn, parts) or None)


def move_to_tags(turn: Turn) -> Turn:
    """Return an answer whose reasoning, if it has any, is in tags before its text."""
    parts = split_reasoning(turn.content)
    if not turn.reasoning and (parts is None or OPENING in parts.opening):
        return turn
    if parts is None:
        content = f"{OPENING}\n{turn.reasoning}\n{CLOSING}\n\n{turn.content}"
    elif not turn.reasoning:
        content = f"{OPENING}\n{turn.content.lstrip()}"
    else:
        content = f"{OPENING}\n{_joined(turn, parts)}\n{CLOSING}\n\n{parts.answer}"
    return replace(turn, content=content, reasoning=None)


def remove_reasoning(turn: Turn) -> Turn:
    """Return an answer without reasoning, also without a block that does not end."""
    parts = split_reasoning(turn.content)
    content = _BLOCK.sub("", parts.answer if parts else turn.content)
    if content.lstrip().startswith(OPENING):
        content = ""
    return replace(turn, content=content, reasoning=None)


def reasoning_of(turn: Turn) -> str:
    """Return the reasoning of an answer, without surrounding white space."""
    parts = split_reasoning(turn.content)
    return (_joined(turn, parts) if parts else turn.reasoning or "").strip()


def _joined(turn: Turn, parts: TaggedText) -> str:
    """Return the reasoning of the field and that of the tags, once if they are the same."""
    field = (turn.reasoning or "").strip()
    return "\n\n".join(dict.fromkeys(filter(None, (field, parts.reasoning))))
