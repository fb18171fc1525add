"""Read single values of a row: texts, weights, JSON, and columns by their path.

Decides which values are sound, and which settings to suggest where no format is recognized. Never
reads files.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from data_modules.messages import listed, shown

MAX_WEIGHT = 3.4e38
"""weights are float32 in a batch: what lies above would be infinite there"""
LEAVE_OUT = "or leave such rows out by data.drop_empty=true or data.on_bad_row=quarantine"
"""what can be done about an empty answer but mending it"""
_TEXT_PARTS = ("text", "input_text", "output_text")
_CONTROLS = bytes(code for code in range(32) if chr(code) not in "\t\n\r")
_QUESTIONS = ("instruction", "question", "query", "problem", "prompt", "input", "user", "human")
_ANSWERS = (
    *("output", "answer", "response", "completion", "solution", "answers", "target", "reply"),
    *("assistant", "gpt", "summary"),
)
_EXTRAS = ("input", "context", "passage")
_TEXTS = ("text", "content", "body", "document", "article", "code", "markdown")
_ROLE_NAMES = ("role", "from")
_DEPTH = 3


class RowError(ValueError):
    """Say what is wrong with one row, without its place: the caller knows that."""


class EmptyAnswerError(RowError):
    """Say that an answer is empty; a caller may count such rows and leave them out."""


class MissingColumnError(RowError):
    """Say which field a row lacks; `columns` are the row's, by which such rows are counted."""

    def __init__(self, problem: str, columns: Iterable[str] = ()) -> None:
        super().__init__(problem)
        self.columns = tuple(columns)


def nearest(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return "; did you mean 'x'?" for the name in `known` nearest to `name`, or `otherwise`."""
    close = difflib.get_close_matches(name, list(dict.fromkeys(known)), 1, 0.6)
    return f"; did you mean '{close[0]}'?" if close else otherwise


def misnamed(name: str, found: Iterable[str], cutoff: float = 0.6) -> str:
    """Return "; 'x' is near: did you mean 'name'?" for the name in `found` nearest to `name`.

    Where `name` itself is there, its value is what cannot be used.
    """
    keys = list(found)
    if name in keys:
        return f"; '{name}' is empty or not a text"
    close = difflib.get_close_matches(name, keys, 1, cutoff)
    return f"; '{close[0]}' is near: did you mean '{name}'?" if close else ""


def kind(value: Any) -> str:
    """Return what a message calls a value that is not what it should be."""
    if value is None:
        return "null"
    if isinstance(value, (dict, list)):
        return type(value).__name__
    return f"{type(value).__name__} {shown(str(value)[:40])}"


def quoted(value: Any) -> str:
    """Return how a message quotes a value that is a text or a number, or what kind it is."""
    return shown(repr(value)) if isinstance(value, (str, int, float)) else kind(value)


def read_text(value: Any, where: str) -> str:
    """Return the text of a string or of a list of text parts; raise RowError for all else."""
    if isinstance(value, str):
        return check_text(value, where)
    if isinstance(value, list):
        return "".join(read_text_part(part, f"{where}[{i}]") for i, part in enumerate(value))
    raise RowError(f"{where} is {kind(value)}, not text; give a string")


def read_optional_text(values: Mapping[str, Any], field: str) -> str:
    """Return the text of `field`, empty when there is none or it is null."""
    value = values.get(field)
    return "" if value is None else read_text(value, field)


def read_answer(value: Any, where: str) -> str:
    """Return the text of an answer; raise EmptyAnswerError when there is nothing in it."""
    text = read_text(value, where)
    if is_blank(text):
        raise EmptyAnswerError(
            f"{where} is empty: there is no answer to train on; drop the row, {LEAVE_OUT}"
        )
    return text


def is_blank(text: str) -> bool:
    """Tell whether there is nothing but white space in `text`."""
    return not text or text.isspace()


def check_text(text: str, where: str) -> str:
    """Return `text`; raise RowError when a tokenizer cannot take it, or should not see it.

    Refused are halves of a character pair (no UTF-8) and control characters but tab, newline and
    carriage return.
    """
    try:
        encoded = text.encode()
    except UnicodeEncodeError as error:
        _refuse_character(text, error.start, "half of a character pair", where)
    if len(encoded.translate(None, _CONTROLS)) != len(encoded):
        start = next(i for i, c in enumerate(text) if c < " " and c not in "\t\n\r")
        _refuse_character(text, start, "a control character", where)
    return text


def _refuse_character(text: str, start: int, what: str, where: str) -> NoReturn:
    raise RowError(
        f"{where} has {what}, {text[start]!r}, at character {start + 1}; remove it, or set such "
        "rows aside by data.on_bad_row=quarantine"
    )


def read_text_part(part: Any, where: str) -> str:
    """Return the text of a part that is a string or {type, text}; raise RowError for all else."""
    if isinstance(part, str):
        return check_text(part, where)
    name = part.get("type") or "text" if isinstance(part, dict) else type(part).__name__
    if name not in _TEXT_PARTS:
        what = shown(name) if isinstance(name, str) else kind(name)
        raise RowError(f"{where} is {what}: not supported; only text is trained on")
    return read_part(part, name, where)


def read_part(part: dict[str, Any], name: str, where: str) -> str:
    """Return the text that a part of type `name` holds, under `text`, `value` or its type."""
    value = next((part[key] for key in ("text", "value", name) if part.get(key) is not None), None)
    if not isinstance(value, str):
        seen = "no text" if value is None else f"{kind(value)} where its text should be"
        raise RowError(f"{where} has {seen}; give it under 'text'")
    return check_text(value, where)


def read_optional_string(item: Mapping[str, Any], key: str, where: str) -> str | None:
    """Return the text under `key`, None when there is none; raise RowError for all but text."""
    value = item.get(key)
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise RowError(f"{where}.{key} is {kind(value)}; give a string")
    return check_text(value, f"{where}.{key}")


def read_weight(value: Any, where: str) -> float:
    """Return a weight; raise RowError for all but a number from 0 up."""
    if not isinstance(value, (int, float)) or not 0 <= value <= MAX_WEIGHT:
        raise RowError(f"{where} is {quoted(value)}; a weight is a number from 0 up")
    return float(value)


def row_weight(values: Mapping[str, Any]) -> float:
    """Return what the column `weight` says, as a number or its text; 1 when it is null or empty."""
    value = values.get("weight")
    if value is None or value == "":
        return 1.0
    if isinstance(value, str):
        # A csv file has nothing but text.
        try:
            value = float(value)
        except ValueError as error:
            raise RowError(
                f"weight is {quoted(value)}, not a number from 0 up; rename the column if it "
                "is not a weight"
            ) from error
    return read_weight(value, "weight")


def read_json(text: str, where: str) -> Any:
    """Return the value that a JSON text holds; raise RowError with the place in the text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RowError(
            f"{where} is not JSON: {error.msg} at character {error.pos + 1} of "
            f"'{shown(text)}'; mend it"
        ) from error
    except RecursionError as error:
        raise RowError(f"{where} cannot be read as JSON: it is nested too deeply") from error
    except ValueError as error:
        raise RowError(f"{where} cannot be read as JSON: {shown(str(error))}") from error


def check_json(value: Any, where: str) -> None:
    """Raise RowError when `value` cannot be written as JSON: NaN, dates, halves of characters."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        reason = shown(str(error))
        raise RowError(f"{where} cannot be written as JSON: {reason}") from error


def read_path(values: Mapping[str, Any], path: str, key: str) -> Any:
    """Return what lies under a column, or under a dotted path such as `instances.0.output`.

    A column of that very name comes before a path. Raises MissingColumnError, which names the
    deepest part that is there; `key` is the setting to look at.
    """
    if path in values:
        return values[path]
    found: Any = values
    steps = path.split(".")
    for depth, step in enumerate(steps):
        inner = _step(found, step)
        if not inner:
            there = ".".join(steps[:depth])
            raise MissingColumnError(f"{_missing_step(found, step, there)} ({key})", values)
        found = inner[0]
    return found


def _step(value: Any, step: str) -> Sequence[Any]:
    """Return a sequence of what is under `step`, empty when there is nothing."""
    if isinstance(value, Mapping):
        return [value[step]] if step in value else []
    if isinstance(value, list) and step.isdecimal() and step.isascii():
        return value[int(step) :][:1]
    return []


def _missing_step(value: Any, step: str, there: str) -> str:
    if not there:
        return f"missing '{step}'; found {listed(value)}{nearest(step, value)}"
    if isinstance(value, Mapping):
        return f"missing '{there}.{step}'; '{there}' has {listed(value)}{nearest(step, value)}"
    if isinstance(value, list):
        return (
            f"missing '{there}.{step}'; '{there}' is a list of {len(value)}: "
            "give a number, counted from 0"
        )
    return f"missing '{there}.{step}'; '{there}' is {kind(value)}, with nothing in it to name"


def suggest_settings(values: Mapping[str, Any]) -> str:
    """Return format and columns to set, as in `format: alpaca, columns: {instruction: question}`.

    "" where nothing in the row looks like one; `values` are those of such a row.
    """
    for name, value in values.items():
        if is_turns(value):
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


def is_turns(value: Any) -> bool:
    """Tell whether a value is a list of turns, by its first element."""
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
