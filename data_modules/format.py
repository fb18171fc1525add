"""Turn a row into a conversation or a document, by the name of its format.

Decides what a row means. Never tokenises and never reads files.

Rules for conversations: roles go by their usual names (`human`, `gpt`, ...); turns of one role in
a row are joined by an empty line; a system turn comes first; a user turn comes before the first
answer. `columns` in the settings maps a format's field to the column that holds it.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from data_modules.types import Conversation, Document, Origin, Row, Segment, Turn, shown

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
}
_TEXT_PARTS = ("text", "input_text", "output_text", "reasoning", "thinking", "tool_call")
_ANSWERS = ("output", "response", "completion")


class RowError(ValueError):
    """Say what is wrong with one row, without its place: the caller knows that."""


class MissingColumnError(RowError):
    """Say which field a row lacks; rows with the same columns are reported once."""


@dataclass(frozen=True, slots=True)
class Format:
    """Describe a format: its fields with their aliases, and the function that reads a row."""

    name: str
    required: tuple[tuple[str, ...], ...]
    optional: tuple[str, ...]
    read: Callable[[dict[str, Any], Origin], Conversation | Document]

    def fields(self) -> list[str]:
        """Return all names that `columns` can map, aliases included."""
        return [name for names in self.required for name in names] + list(self.optional)

    def fits(self, columns: Iterable[str]) -> bool:
        """Tell whether `columns` hold every required field."""
        present = set(columns)
        return all(present.intersection(names) for names in self.required)


def guess_format(columns: Iterable[str]) -> str | None:
    """Return the name of the first format whose required fields are all in `columns`."""
    present = list(columns)
    return next((name for name, form in FORMATS.items() if form.fits(present)), None)


def check_format(name: str) -> None:
    """Raise ValueError with the nearest name when there is no format `name`."""
    if name not in FORMATS:
        raise ValueError(f"format: unknown format '{name}'{_did_you_mean(name, FORMATS)}")


def check_columns(name: str, columns: Mapping[str, str]) -> None:
    """Raise ValueError when `columns` maps a field that format `name` does not have."""
    fields = FORMATS[name].fields()
    for field in columns:
        if field not in fields:
            raise ValueError(
                f"columns.{field}: format '{name}' has no field '{field}'"
                f"{_did_you_mean(field, fields)}"
            )


def convert_row(row: Row, name: str, columns: Mapping[str, str]) -> Conversation | Document:
    """Read `row` as format `name`; raises RowError when the row does not hold it."""
    form = FORMATS[name]
    values = apply_columns(row.values, columns)
    for names in form.required:
        if not any(field in values for field in names):
            raise MissingColumnError(_missing(names[0], list(row.values)))
    return form.read(values, row.origin)


def apply_columns(values: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Return `values` with the mapped columns also under their field's name."""
    if not columns:
        return values
    for field, column in columns.items():
        if column not in values:
            raise MissingColumnError(
                f"{_missing(column, list(values))} (data.datasets[].columns.{field})"
            )
    taken = set(columns.values())
    kept = {name: value for name, value in values.items() if name not in taken}
    return kept | {field: values[column] for field, column in columns.items()}


def _missing(field: str, columns: list[str]) -> str:
    close = difflib.get_close_matches(field, columns, 1, 0.6)
    hint = f"; did you mean '{close[0]}'?" if close else ""
    return f"missing '{field}'; found {columns}{hint}"


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    known = list(dict.fromkeys(known))
    close = difflib.get_close_matches(name, known, 1, 0.5)
    return f"; did you mean '{close[0]}'?" if close else f"; use one of {', '.join(known)}"


def _first(values: dict[str, Any], names: Iterable[str]) -> tuple[str, Any]:
    return next((name, values[name]) for name in names if name in values)


def _text(value: Any, where: str) -> str:
    """Return the text of a string or of a list of text parts; raise RowError for all else."""
    if isinstance(value, str):
        _check_characters(value, where)
        return value
    if isinstance(value, list):
        return "".join(_part(part, f"{where}[{index}]") for index, part in enumerate(value))
    seen = "null" if value is None else f"{type(value).__name__} {str(value)[:40]}"
    raise RowError(f"{where} is {seen}, not text; give a string")


def _check_characters(text: str, where: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RowError(
                f"{where} has half of a character pair, {text[error.start]!r}, at character "
                f"{error.start + 1}; remove it"
            ) from error


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        _check_characters(part, where)
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    if kind not in _TEXT_PARTS:
        raise RowError(f"{where} is {kind}: not supported; only text is learned")
    value = part.get("text", part.get("value"))
    if not isinstance(value, str):
        raise RowError(f"{where} has no text; give it under 'text'")
    _check_characters(value, where)
    return value


def _optional_text(values: dict[str, Any], field: str) -> str:
    value = values.get(field)
    return "" if value is None else _text(value, field)


def _read_alpaca(values: dict[str, Any], origin: Origin) -> Conversation:
    question = _text(values["instruction"], "instruction")
    if extra := _optional_text(values, "input").strip():
        question = f"{question}\n\n{extra}"
    name, answer = _first(values, _ANSWERS)
    turns = [Turn("user", question), Turn("assistant", _text(answer, name))]
    if system := _optional_text(values, "system"):
        turns.insert(0, Turn("system", system))
    return Conversation(tuple(turns), origin)


def _read_messages(values: dict[str, Any], origin: Origin) -> Conversation:
    name, items = _first(values, ("messages", "conversations", "conversation"))
    if not isinstance(items, list):
        seen = "null" if items is None else type(items).__name__
        raise RowError(f"{name} is {seen}, not a list of turns")
    if not items:
        raise RowError(f"{name} is empty; give at least a user and an assistant turn")
    turns = [_read_turn(item, f"{name}[{index}]") for index, item in enumerate(items)]
    if (system := _optional_text(values, "system")) and turns[0].role != "system":
        turns.insert(0, Turn("system", system))
    return Conversation(_check_order(_join_same_roles(turns), name), origin)


def _read_turn(item: Any, where: str) -> Turn:
    if not isinstance(item, dict):
        raise RowError(f"{where} is {type(item).__name__}; a turn is {{role, content}}")
    role = item.get("role", item.get("from"))
    if not isinstance(role, str) or role not in ROLES:
        raise RowError(f"{where} has role {shown(repr(role))}; known roles are {', '.join(ROLES)}")
    if item.get("tool_calls"):
        raise RowError(f"{where}.tool_calls is not supported; write the call into its content")
    name = next((name for name in ("content", "value", "text") if name in item), None)
    if name is None:
        raise RowError(f"{where} has no content; found {list(item)}")
    return Turn(ROLES[role], _text(item[name], f"{where}.{name}"), _turn_weight(item, where))


def _turn_weight(item: dict[str, Any], where: str) -> float | None:
    for name in ("weight", "train"):
        if item.get(name) is not None:
            return _weight(item[name], f"{where}.{name}")
    return None


def _weight(value: Any, where: str) -> float:
    if not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise RowError(f"{where} is {value!r}; a weight is a number from 0 up")
    return float(value)


def _join_same_roles(turns: list[Turn]) -> list[Turn]:
    joined: list[Turn] = []
    for turn in turns:
        last = joined[-1] if joined else None
        if last and last.role == turn.role != "tool" and last.weight == turn.weight:
            joined[-1] = Turn(turn.role, f"{last.content}\n\n{turn.content}", turn.weight)
        else:
            joined.append(turn)
    return joined


def _check_order(turns: list[Turn], name: str) -> tuple[Turn, ...]:
    roles = [turn.role for turn in turns]
    if "system" in roles[1:]:
        raise RowError(f"{name}: a system turn comes after others; put it first")
    if "assistant" in roles and "user" not in roles[: roles.index("assistant")]:
        raise RowError(
            f"{name}: an assistant turn comes before any user turn; put a user turn first"
        )
    return tuple(turns)


def _read_prompt_completion(values: dict[str, Any], origin: Origin) -> Document:
    prompt = _text(values["prompt"], "prompt")
    name, answer = _first(values, ("completion", "response", "output"))
    return Document((Segment(prompt, 0.0), Segment(_text(answer, name), 1.0)), origin)


def _read_completion(values: dict[str, Any], origin: Origin) -> Document:
    name, value = _first(values, ("segments", "text", "content"))
    if name != "segments":
        return Document((Segment(_text(value, name), 1.0),), origin)
    if not isinstance(value, list) or not value:
        raise RowError("segments is not a list with at least one {text, weight}")
    return Document(tuple(_read_segment(item, i) for i, item in enumerate(value)), origin)


def _read_segment(item: Any, index: int) -> Segment:
    where = f"segments[{index}]"
    if not isinstance(item, dict) or "text" not in item:
        raise RowError(f"{where} is not {{text, weight}}")
    weight = _weight(item.get("weight", 1.0), f"{where}.weight")
    return Segment(_text(item["text"], f"{where}.text"), weight)


FORMATS: dict[str, Format] = {
    form.name: form
    for form in (
        Format("messages", (("messages",),), ("system",), _read_messages),
        Format("sharegpt", (("conversations", "conversation"),), ("system",), _read_messages),
        Format("alpaca", (("instruction",), _ANSWERS), ("input", "system"), _read_alpaca),
        Format(
            "prompt_completion",
            (("prompt",), ("completion", "response", "output")),
            (),
            _read_prompt_completion,
        ),
        Format("completion", (("text", "content", "segments"),), (), _read_completion),
    )
}
