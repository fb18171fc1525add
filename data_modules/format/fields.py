"""Read and check single values of a row: texts, weights, JSON, and columns by their path.

Never reads files.
"""

from __future__ import annotations

import difflib
import json
import keyword
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from common.text import listed, shown
from data_modules.types import Struct

_MAX_WEIGHT = 3.4e38
"""largest weight: weights are float32 in a batch, where a larger one would be infinite"""
SKIP_EMPTY = "or skip such rows with data.drop_empty=true or data.on_bad_row=quarantine"
"""the fix for an empty answer, besides changing the row"""
_TEXT_PARTS = ("text", "input_text", "output_text")
_ALLOWED = "\t\n\r\f"
"""control characters of text; a form feed starts a page"""
_CONTROLS = bytes(code for code in range(32) if chr(code) not in _ALLOWED)
_ROLE_NAMES = ("role", "from")


class RowError(ValueError):
    """What is wrong with a row; the caller adds the row's file and line."""


class EmptyAnswerError(RowError):
    """An answer is empty; callers may count such rows and skip them."""


class MissingColumnError(RowError):
    """A row lacks a field; such rows are counted by `columns`, the columns that the row has."""

    def __init__(self, problem: str, columns: Iterable[str] = ()) -> None:
        super().__init__(problem)
        self.columns = tuple(columns)


def nearest_hint(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return "; did you mean 'x'?" for the name in `known` nearest to `name`, or `otherwise`."""
    close = difflib.get_close_matches(name, list(dict.fromkeys(known)), 1, 0.6)
    return f"; did you mean '{close[0]}'?" if close else otherwise


def typo_hint(name: str, found: Iterable[str], cutoff: float = 0.6) -> str:
    """Return "; did you mean 'name' instead of 'x'?" for the name in `found` nearest to `name`.

    If `name` itself is in `found`, its value cannot be used.
    """
    keys = list(found)
    if name in keys:
        return f"; '{name}' is empty or not text"
    close = difflib.get_close_matches(name, keys, 1, cutoff)
    return f"; did you mean '{name}' instead of '{close[0]}'?" if close else ""


def type_of(value: Any) -> str:
    """Return the type of a value, and the start of it, for an error message."""
    if value is None:
        return "null"
    if isinstance(value, (dict, list)):
        return type(value).__name__
    return f"{type(value).__name__} {shown(str(value)[:40])}"


def quote(value: Any) -> str:
    """Return a text or a number quoted for an error message, or the type of another value."""
    return shown(repr(value)) if isinstance(value, (str, int, float)) else type_of(value)


def read_text(value: Any, where: str) -> str:
    """Return the text of a string or of a list of text parts; raise RowError for other values."""
    if isinstance(value, str):
        return check_text(value, where)
    if isinstance(value, list):
        check_parts(value, where)
        return "".join(read_text_part(part, f"{where}[{i}]") for i, part in enumerate(value))
    raise RowError(f"{where} is {type_of(value)}, not text; give a string")


def check_parts(parts: list[Any], where: str) -> None:
    """Raise RowError if a list is of several texts, none of which says that it is a part of one.

    They may as well be alternatives, or the column of a whole table.
    """
    is_typed = any(isinstance(part, dict) and part.get("type") is not None for part in parts)
    if len(parts) < 2 or is_typed:
        return
    kind = "strings" if isinstance(parts[0], str) else "values"
    pick = "" if "[" in where else f"choose one, as in columns: {{{where}: {where}.0}}, or "
    raise RowError(
        f"{where} is a list of {len(parts):,} {kind}, not one text; {pick}give one string, or "
        "parts of {type: text, text: ...}"
    )


def read_optional_text(values: Mapping[str, Any], field: str) -> str:
    """Return the text of `field`; "" if it is missing or null."""
    value = values.get(field)
    return "" if value is None else read_text(value, field)


def read_answer(value: Any, where: str) -> str:
    """Return the text of an answer; raise EmptyAnswerError if it is blank."""
    text = read_text(value, where)
    if is_blank(text):
        raise EmptyAnswerError(
            f"{where} is empty: there is no answer to train on; drop the row, {SKIP_EMPTY}"
        )
    return text


def is_blank(text: str) -> bool:
    """Return whether `text` is empty or white space."""
    return not text or text.isspace()


def check_text(text: str, where: str) -> str:
    """Return `text`; raise RowError if it has characters that must not be tokenized.

    These are unpaired surrogates, which UTF-8 cannot encode, and control characters other than
    `_ALLOWED`.
    """
    try:
        encoded = text.encode()
    except UnicodeEncodeError as error:
        _raise_bad_character(text, error.start, "an unpaired surrogate", where)
    if len(encoded.translate(None, _CONTROLS)) != len(encoded):
        start = next(i for i, c in enumerate(text) if c < " " and c not in _ALLOWED)
        _raise_bad_character(text, start, "a control character", where)
    return text


def _raise_bad_character(text: str, start: int, what: str, where: str) -> NoReturn:
    raise RowError(
        f"{where} has {what}, {text[start]!r}, at character {start + 1}; remove it, or set such "
        "rows aside with data.on_bad_row=quarantine"
    )


def read_text_part(part: Any, where: str) -> str:
    """Return the text of a string or of a {type, text} part; raise RowError for other parts."""
    if isinstance(part, str):
        return check_text(part, where)
    name = part.get("type") or "text" if isinstance(part, dict) else type(part).__name__
    if name not in _TEXT_PARTS:
        found = shown(name) if isinstance(name, str) else type_of(name)
        raise RowError(f"{where} is {found}: not supported; only text is trained on")
    return read_part(part, name, where)


def read_part(part: dict[str, Any], name: str, where: str) -> str:
    """Return the text of a part of type `name`, from its field `text`, `value` or `name`."""
    value = next((part[key] for key in ("text", "value", name) if part.get(key) is not None), None)
    if not isinstance(value, str):
        found = "no text" if value is None else f"{type_of(value)} instead of text"
        raise RowError(f"{where} has {found}; give a string under 'text'")
    return check_text(value, where)


def read_optional_string(item: Mapping[str, Any], key: str, where: str) -> str | None:
    """Return the text under `key`, None if missing or empty; raise RowError for other types."""
    value = item.get(key)
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise RowError(f"{where}.{key} is {type_of(value)}; give a string")
    return check_text(value, f"{where}.{key}")


def read_weight(value: Any, where: str) -> float:
    """Return a weight; raise RowError if it is not a number from 0 up."""
    if not isinstance(value, (int, float)) or not 0 <= value <= _MAX_WEIGHT:
        raise RowError(f"{where} is {quote(value)}; a weight is a number from 0 up")
    return float(value)


def read_json(text: str, where: str) -> Any:
    """Return the value of a JSON text; raise RowError with the position of an error in it."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RowError(
            f"{where} is not JSON: {error.msg} at character {error.pos + 1} of "
            f"'{shown(text)}'; fix it"
        ) from error
    except RecursionError as error:
        raise RowError(f"{where} cannot be read as JSON: it is nested too deeply") from error
    except ValueError as error:
        raise RowError(f"{where} cannot be read as JSON: {shown(str(error))}") from error


def check_json(value: Any, where: str) -> None:
    """Raise RowError if `value` cannot be written as JSON: NaN, dates, unpaired surrogates."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        reason = shown(str(error))
        raise RowError(f"{where} cannot be written as JSON: {reason}") from error


_RESERVED = frozenset(
    (
        *("messages", "conversation", "conversations", "tools", "chat_template"),
        *("add_generation_prompt", "continue_final_message", "tokenize", "tokenizer_kwargs"),
        *("padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "sanitize_control_tokens", "raise_exception"),
        *("strftime_now", "self"),
    )
)
"""what rendering itself hands to a chat template, or takes as its own argument"""


def read_template_kwargs(value: Any, where: str) -> dict[str, Any]:
    """Return the arguments of the chat template in a row's column: an object, or its JSON text."""
    if isinstance(value, str):
        value = {} if is_blank(value) else read_json(value, where)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RowError(f"{where} is {type_of(value)}, not an object of names and values")
    if problems := find_kwargs_problems(value):
        raise RowError(f"{where}: {problems[0]}")
    check_json(value, where)
    return value


def find_kwargs_problems(kwargs: Mapping[str, Any]) -> list[str]:
    """Return a problem for each name that may not be an argument of the chat template."""
    problems = []
    for name in map(str, kwargs):
        if name in _RESERVED or name.endswith("_token"):
            problems.append(f"'{shown(name)}' is set by the rendering itself; leave it out")
        elif not name.isidentifier() or keyword.iskeyword(name):
            problems.append(f"'{shown(name)}' is not the name of a variable; correct it")
    return problems


def read_path(values: Mapping[str, Any], path: str, key: str) -> Any:
    """Return the value of a column, or at a dotted path such as `instances.0.output`.

    A column with that exact name takes precedence. Raises MissingColumnError, which names the
    deepest existing part of the path; `key` is the setting that holds the path.
    """
    if path in values:
        return values[path]
    found: Any = values
    steps = path.split(".")
    for depth, step in enumerate(steps):
        inner = _step(found, step)
        if not inner:
            parent = ".".join(steps[:depth])
            raise MissingColumnError(f"{_missing_step(found, step, parent)} ({key})", values)
        found = inner[0]
    return found


def _step(value: Any, step: str) -> Sequence[Any]:
    """Return the value under `step` as a sequence of one; empty if there is none."""
    if isinstance(value, Struct) and step in value.nulls:
        return [None]
    if isinstance(value, Mapping):
        return [value[step]] if step in value else []
    if isinstance(value, list) and step.isdecimal() and step.isascii():
        return value[int(step) :][:1]
    return []


def _missing_step(value: Any, step: str, parent: str) -> str:
    if not parent:
        return f"missing '{step}'; found {listed(value)}{nearest_hint(step, value)}"
    if isinstance(value, Mapping):
        return (
            f"missing '{parent}.{step}'; '{parent}' has {listed(value)}{nearest_hint(step, value)}"
        )
    if isinstance(value, list):
        return (
            f"missing '{parent}.{step}'; '{parent}' is a list of {len(value)}: "
            "give a number, counted from 0"
        )
    return f"missing '{parent}.{step}'; '{parent}' is {type_of(value)}, which has no fields"


def is_turns(value: Any) -> bool:
    """Return whether a value is a list of turns, by its first element."""
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and any(name in first for name in _ROLE_NAMES)
