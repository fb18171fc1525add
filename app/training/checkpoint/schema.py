"""Schemas of JSON documents, with messages that name each wrong key; needs no torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Json = Any
"""a value that JSON can hold"""
MAX_NAMES = 20
"""names listed in one message"""
MAX_SHOWN = 60
"""characters of a value in a message"""
MAX_COUNT = 2**53
"""above any number of steps, tokens or ranks; JSON readers differ beyond"""


@dataclass(frozen=True, slots=True)
class Kind:
    """Values that `holds` accepts, described by `words`."""

    words: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class ListOf:
    """A list of elements of one schema, of a fixed length if given."""

    element: Any
    length: int | None = None


@dataclass(frozen=True, slots=True)
class MapOf:
    """An object with any keys, whose values have one schema."""

    value: Any


@dataclass(frozen=True, slots=True)
class Keys:
    """An object with these keys, each with its schema."""

    needed: Mapping[str, Any]
    optional: Mapping[str, Any]
    has_others: bool = False
    """whether unknown keys are allowed"""


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < math.inf


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_COUNT


COUNT = Kind("a whole number from 0 on", _is_count)
POSITIVE_COUNT = Kind("a whole number from 1 on", lambda value: _is_count(value) and value > 0)
STEP = Kind(
    "a whole number from -1 on", lambda value: _is_count(value) or (type(value), value) == (int, -1)
)
NUMBER = Kind("a finite number", is_number)
AMOUNT = Kind("a finite number from 0 on", lambda value: is_number(value) and value >= 0)
POSITIVE = Kind("a finite number above 0", lambda value: is_number(value) and value > 0)
TEXT = Kind("text", lambda value: isinstance(value, str))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
NOTHING = Kind("{}", lambda value: value == {})
IDENTITY = Kind(
    "32 hexadecimal digits",
    lambda value: isinstance(value, str) and re.fullmatch("[0-9a-f]{32}", value) is not None,
)


def differences(value: Any, expected: Any, key: str) -> Iterator[str]:
    """Yield where a value differs from its schema, by full keys."""
    if isinstance(expected, Kind):
        if not expected.holds(value):
            yield f"{key} is {shown(value)}; expected {expected.words}"
    elif isinstance(expected, ListOf):
        wants = "a list" if expected.length is None else f"a list of {expected.length}"
        if not isinstance(value, list) or len(value) != (expected.length or len(value)):
            yield f"{key or 'the document'} is {shown(value)}; expected {wants}"
            return
        for index, element in enumerate(value):
            yield from differences(element, expected.element, f"{key}[{index}]")
    elif not isinstance(value, dict):
        yield f"{key or 'the document'} is {shown(value)}; expected an object"
    elif isinstance(expected, MapOf):
        for name, element in value.items():
            yield from differences(element, expected.value, _below(key, name))
    else:
        yield from differences_of_keys(value, expected, key)


def differences_of_keys(value: Mapping[str, Any], expected: Keys, key: str) -> Iterator[str]:
    known = {**expected.needed, **expected.optional}
    for name in expected.needed:
        if name not in value:
            yield f"{_below(key, name)} is missing"
    for name, element in value.items():
        if name in known:
            yield from differences(element, known[name], _below(key, name))
        elif not expected.has_others:
            yield f"{_below(key, name)} is not a known key"


def _below(key: str, name: str) -> str:
    name = printable(name)
    return f"{key}.{name}" if key else name


def shown(value: Any) -> str:
    """Format a value from a file for a message: short, on one line, in ASCII."""
    text = json.dumps(value) if not isinstance(value, (list, dict)) or len(value) < 9 else ""
    if not text or len(text) > MAX_SHOWN:
        if isinstance(value, (list, dict)):
            what = "a list" if isinstance(value, list) else "an object"
            return f"{what} of {len(value):,}"
        return f"{text[:MAX_SHOWN]}..."
    return text


def printable(name: str) -> str:
    """Format a name from a file for a message."""
    return name if re.fullmatch(r"[\w./\[\]-]{1,200}", name, re.ASCII) else shown(name)


def listed(names: Sequence[str]) -> str:
    """Format names from a file for a message."""
    more = f" and {len(names) - MAX_NAMES:,} more" if len(names) > MAX_NAMES else ""
    return ", ".join(map(printable, names[:MAX_NAMES])) + more
