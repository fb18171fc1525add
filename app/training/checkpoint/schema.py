"""Schemas of JSON documents, with error messages that name each wrong key; imports no torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Json = Any
"""a value that can be written as JSON"""
_MAX_NAMES = 20
"""most names listed in one message"""
_MAX_VALUE_CHARS = 60
"""most characters of a value in a message"""
_MAX_COUNT = 2**53
"""exceeds any number of steps, tokens or ranks; JSON readers disagree on larger integers"""


@dataclass(frozen=True, slots=True)
class Kind:
    """Values that `accepts` returns true for; error messages call them `description`."""

    description: str
    accepts: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class ListOf:
    """A list whose elements have one schema; of a fixed length if `length` is given."""

    element: Any
    length: int | None = None


@dataclass(frozen=True, slots=True)
class MapOf:
    """An object with arbitrary keys, whose values have one schema."""

    value: Any


@dataclass(frozen=True, slots=True)
class Keys:
    required: Mapping[str, Any]
    optional: Mapping[str, Any]
    allows_others: bool = False
    """whether unknown keys are allowed"""


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < math.inf


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_COUNT


COUNT = Kind("a whole number of at least 0", _is_count)
POSITIVE_COUNT = Kind("a whole number of at least 1", lambda value: _is_count(value) and value > 0)
STEP = Kind(
    "a whole number of at least -1",
    lambda value: _is_count(value) or (type(value), value) == (int, -1),
)
NUMBER = Kind("a finite number", is_number)
AMOUNT = Kind("a finite number of at least 0", lambda value: is_number(value) and value >= 0)
POSITIVE = Kind("a finite number above 0", lambda value: is_number(value) and value > 0)
TEXT = Kind("a string", lambda value: isinstance(value, str))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
NOTHING = Kind("{}", lambda value: value == {})
_IDENTITY = Kind(
    "32 hexadecimal digits",
    lambda value: isinstance(value, str) and re.fullmatch("[0-9a-f]{32}", value) is not None,
)


ANYTHING = Kind("anything", lambda _: True)
RUN = Keys({"id": _IDENTITY, "plan": _IDENTITY}, {}, allows_others=True)
"""id and plan of a run, in its manifest and its checkpoints"""


def or_null(kind: Kind) -> Kind:
    return Kind(f"{kind.description}, or null", lambda value: value is None or kind.accepts(value))


def differences(value: Any, expected: Any, key: str) -> Iterator[str]:
    """Yield each difference between a value and its schema, with its full key."""
    if isinstance(expected, Kind):
        if not expected.accepts(value):
            yield f"{key} is {format_value(value)}; expected {expected.description}"
    elif isinstance(expected, ListOf):
        if not isinstance(value, list) or len(value) != (expected.length or len(value)):
            wanted = "a list" if expected.length is None else f"a list of {expected.length}"
            yield f"{key or 'the document'} is {format_value(value)}; expected {wanted}"
            return
        for index, element in enumerate(value):
            yield from differences(element, expected.element, f"{key}[{index}]")
    elif not isinstance(value, dict):
        yield f"{key or 'the document'} is {format_value(value)}; expected an object"
    elif isinstance(expected, MapOf):
        for name, element in value.items():
            yield from differences(element, expected.value, _join_key(key, name))
    else:
        known = {**expected.required, **expected.optional}
        for name in expected.required:
            if name not in value:
                yield f"{_join_key(key, name)} is missing"
        for name, element in value.items():
            if name in known:
                yield from differences(element, known[name], _join_key(key, name))
            elif not expected.allows_others:
                yield f"{_join_key(key, name)} is not a known key"


def _join_key(parent: str, name: str) -> str:
    name = printable(name)
    return f"{parent}.{name}" if parent else name


def format_value(value: Any) -> str:
    """Format a value from a file for a message: short, on one line, in ASCII."""
    text = json.dumps(value) if not isinstance(value, (list, dict)) or len(value) < 9 else ""
    if text and len(text) <= _MAX_VALUE_CHARS:
        return text
    if isinstance(value, (list, dict)):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value):,}"
    return f"{text[:_MAX_VALUE_CHARS]}..."


def printable(name: str) -> str:
    return name if re.fullmatch(r"[\w./\[\]-]{1,200}", name, re.ASCII) else format_value(name)


def format_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES:,} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(map(printable, names[:_MAX_NAMES])) + more
