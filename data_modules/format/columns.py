"""Find what nothing reads: columns of a row, keys of its turns, of their parts and calls.

They are counted for the reports. Never converts a row, and never refuses one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from data_modules.format.fields import is_turns
from data_modules.format.tokens import DOCUMENT_IDS, MASKS, PACKED
from data_modules.format.turns import (
    CALL_ROLES,
    CONTENT_FIELDS,
    MEDIA,
    REASONING_FIELDS,
    ROLES,
    TOOLS,
    arguments_key,
)
from data_modules.format.weights import (
    FLAGS,
    MASK_KEYS,
    is_flag,
)

PREFERENCE = re.compile(r"(chosen|rejected)(_|$)")
"""names of the columns of preference pairs"""
VERDICTS = ("label", "kto_tag")
"""columns that say whether an answer is wanted"""
_WHOLE = frozenset((*TOOLS, "chat_template_kwargs"))
"""columns that are handed to the template as they are"""
_TELLING = frozenset(
    (
        *MASK_KEYS,
        *MASKS,
        *PACKED,
        *DOCUMENT_IDS,
        *TOOLS,
        *MEDIA,
        *VERDICTS,
        *CONTENT_FIELDS,
        *("system", "input", "history", "parameters", "chat_template_kwargs", "input_ids"),
        *("mask", "masked", "trainable"),
    )
)
"""names that mean something where they are read: the first to be named if they are not"""


def sort_unread(counts: Mapping[str, tuple[int, str]]) -> list[tuple[str, int, str]]:
    """Return (name, rows, first origin) of what nothing reads, what may matter first."""

    def rank(name: str) -> bool:
        last = name.rpartition(".")[2]
        return last not in _TELLING and not PREFERENCE.match(last)

    ordered = sorted(counts.items(), key=lambda found: (rank(found[0]), -found[1][0], found[0]))
    return [(name, rows, origin) for name, (rows, origin) in ordered]


def is_filled(value: Any) -> bool:
    """Return whether a value is more than null or empty."""
    return value is not None and value != "" and value != [] and value != {}


def find_unread(
    row: Mapping[str, Any],
    values: Mapping[str, Any],
    columns: Mapping[str, str],
    read: Iterable[str],
    others: Iterable[str],
    *,
    has_turns: bool,
) -> set[str]:
    """Return the names of a row's columns and inner keys that nothing reads and that hold a value.

    `row` is as in its file, `values` the same after `columns` is applied; the columns of `values`
    are `read` by the format, or `others`. Of those FLAGS are read nevertheless if they hold a truth
    value, or one for each turn.
    """
    unread = {name for name in others if is_filled(values[name])}
    if columns:
        hidden = {name for name in row if name in columns or name not in values}
        unread |= {name for name in hidden if is_filled(row[name])}
        unread -= {*columns.values(), *(path.split(".", 1)[0] for path in columns.values())}
    for name in unread.intersection(FLAGS) if unread else ():
        if is_flag(values.get(name)) or (has_turns and isinstance(values.get(name), list)):
            unread.discard(name)
    for name in read:
        if isinstance(values[name], (list, dict)):
            unread.update(_unread_below(values[name], name))
    return unread


def _unread_below(value: Any, name: str) -> Iterator[str]:
    """Yield the names of keys below a column that nothing reads."""
    if name in _WHOLE:
        return
    if name == "segments" and isinstance(value, list):
        for segment in value:
            flags = [key for key in ("label",) if isinstance(segment.get(key), bool)]
            yield from _others(segment, ("text", *MASK_KEYS, *flags), "segments[]")
    elif isinstance(value, dict) and "replies" in value:
        yield from _unread_in_tree(value)
    elif isinstance(value, dict) and is_turns([value]):
        yield from _unread_in_turn(value, name)
    elif is_turns(value):
        for turn in value:
            if not _is_plain(turn):
                yield from _unread_in_turn(turn, f"{name}[]")
    elif isinstance(value, list):
        yield from _unread_in_parts(value, f"{name}[]")


def _is_plain(turn: Mapping[str, Any]) -> bool:
    """Return whether a turn is a role and a text: most are, and nothing of them is unread."""
    if len(turn) != 2:
        return False
    if "role" in turn and "content" in turn:
        role, content = turn["role"], turn["content"]
    elif "from" in turn and "value" in turn:
        role, content = turn["from"], turn["value"]
    else:
        return False
    return isinstance(content, str) and role not in CALL_ROLES


def _others(item: Mapping[str, Any], read: Iterable[str], where: str) -> Iterator[str]:
    for key in item.keys() - set(read):
        if is_filled(item[key]):
            yield f"{where}.{key}"


def _unread_in_tree(tree: Mapping[str, Any]) -> Iterator[str]:
    read = {"role", "text", "replies", "deleted", *MASK_KEYS}
    todo = [tree]
    while todo:
        message = todo.pop()
        is_reviewed = isinstance(message.get("review_result"), bool)
        yield from _others(message, read | {"review_result"} if is_reviewed else read, "message")
        replies = message.get("replies")
        # Below a message that is left out nothing was checked.
        todo += [reply for reply in replies or () if isinstance(reply, dict)]


def _unread_in_turn(turn: Mapping[str, Any], where: str) -> Iterator[str]:
    role = "role" if turn.get("role") is not None else "from"
    content = next((field for field in CONTENT_FIELDS if field in turn), "")
    reasoning = next((field for field in REASONING_FIELDS if turn.get(field)), "")
    calls = next((key for key in ("tool_calls", "function_call") if turn.get(key)), "")
    read = {role, content, reasoning, calls, *MASK_KEYS}
    if ROLES[turn[role]] == "tool":
        read |= {"name", "tool_call_id"}
    yield from _others(turn, read, where)
    if calls:
        yield from _unread_in_calls(turn[calls], f"{where}.{calls}")
    elif turn[role] in CALL_ROLES:
        yield from _unread_in_calls(turn[content], f"{where}.{content}")
    if isinstance(turn.get(content), list):
        yield from _unread_in_parts(turn[content], f"{where}.{content}[]")


def _unread_in_parts(parts: Iterable[Any], where: str) -> Iterator[str]:
    for part in parts:
        if not isinstance(part, dict):
            continue
        name = part.get("type") or "text"
        keys = ("tool_call", "text", "value") if name == "tool_call" else ("text", "value", name)
        used = next((key for key in keys if part.get(key) is not None), "")
        if name != "tool_call":
            yield from _others(part, ("type", used, *MASK_KEYS), where)
        elif used:
            yield from _others(part, ("type", "id", used, *MASK_KEYS), where)
            yield from _unread_in_calls(part[used], f"{where}.{used}")
        else:
            yield from _unread_in_calls(part, where)


def _unread_in_calls(value: Any, where: str) -> Iterator[str]:
    """Yield the keys of one call or a list of them, or of its JSON text, that nothing reads."""
    if isinstance(value, str):
        value = json.loads(value)
    if isinstance(value, list):
        for call in value:
            yield from _unread_in_calls(call, f"{where}[]")
        return
    inner, read = value.get("function"), ("type", "id", *MASK_KEYS)
    if isinstance(inner, dict):
        yield from _others(value, (*read, "function"), where)
        yield from _others(inner, ("name", arguments_key(inner)), f"{where}.function")
    else:
        yield from _others(value, (*read, "name", arguments_key(value)), where)
