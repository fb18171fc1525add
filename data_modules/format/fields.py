"""Read and check the values of a row: texts, JSON, columns by their path, weights, and tokens.

Weights say which rows, turns and pieces of text are trained on, by the keys that data sets use for
it; several keys of one row or turn are multiplied. A key that says something that cannot be
followed (half a turn, a mask of tokens beside text) is an error, never ignored. An id of a row that
is tokenized already is never changed: one that holds several documents becomes an item for each.
"""

from __future__ import annotations

import difflib
import itertools
import json
import keyword
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NoReturn

from common.errors import Origin
from common.text import listed, shown
from data_modules.types import Item, Ranges, Struct, Tokens, Turn

_MAX_WEIGHT = 3.4e38
"""largest weight: weights are float32 in a batch, where a larger one would be infinite"""
SKIP_EMPTY = "or skip such rows with data.drop_empty=true or data.on_bad_row=quarantine"
"""the fix for an empty answer, besides changing the row"""
_TEXT_PARTS = ("text", "input_text", "output_text")
_ALLOWED = "\t\n\r\f"
"""control characters of text; a form feed starts a page"""
_CONTROLS = bytes(code for code in range(32) if chr(code) not in _ALLOWED)
_ROLE_NAMES = ("role", "from")
FLAGS = ("train", "training", "loss")
"""keys of a turn or a row with true or false"""
WEIGHT_KEYS = ("weight", "loss_weight")
"""keys of a turn or a row with a number from 0 up"""
TURN_MASKS = ("loss_mask", *FLAGS, "loss_scale")
"""columns that may hold a list with a value for each turn"""
_TURN_COLUMNS = frozenset(TURN_MASKS)
TOKEN_MASKS = ("loss_mask", "completion_mask", "assistant_masks", "assistant_mask", "loss_scale")
"""columns that hold a value for each token"""
_ROW_KEYS = frozenset((*WEIGHT_KEYS, *FLAGS, "loss_scale"))
"""columns that weigh the whole row"""
MASK_KEYS = frozenset((*FLAGS, *WEIGHT_KEYS, "loss_scale", "train_detail"))
"""keys by which a turn says whether it is trained on"""
_IGNORED = -100
"""label of a token that is not trained on"""
MASKS = ("labels", "weights", *TOKEN_MASKS)
"""columns with a number for each token; all that a row has are multiplied"""
PACKED = ("position_ids", "seq_lengths", "cu_seqlens")
"""columns that say where the documents of a row begin"""
DOCUMENT_IDS = ("document_ids", "doc_ids", "segment_ids", "sequence_ids")
"""columns with the number of each token's document"""
_MAX_ID = 2**31 - 1
_WORDS = {"true": True, "false": False}
_INDEX = re.compile(r"\[\d+\]")
_OFFSETS = ("begin_offset", "end_offset")
_DETAIL = "{begin_offset: 0, end_offset: LAST_CHARACTER, train: true}"


UNREAD: ContextVar[set[str] | None] = ContextVar("UNREAD", default=None)
"""gets the names of keys in the row that is read which its readers pass over; None if unwanted"""


class RowError(ValueError):
    """What is wrong with a row; the caller adds the row's file and line."""


class EmptyAnswerError(RowError):
    """An answer is empty; callers may count such rows and skip them."""


class MissingColumnError(RowError):
    """A row lacks a field; such rows are counted by `columns`, the columns that the row has."""

    def __init__(self, problem: str, columns: Iterable[str] = ()) -> None:
        super().__init__(problem)
        self.columns = tuple(columns)


class RowColumns(dict[str, Any]):
    """The columns of a row; `read` gets the names of those that are asked for by [] or get()."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)

    def peek(self, name: str) -> Any:
        """Return a value, None without one, that does not count as read."""
        return super().get(name)


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


def is_filled(value: Any) -> bool:
    """Return whether a value is more than null or empty."""
    return value is not None and value != "" and value != [] and value != {}


def note_unread(item: Mapping[str, Any], read: Iterable[str], where: str) -> None:
    """Add the keys of an object that hold a value, but are not among those `read`, to UNREAD."""
    names = UNREAD.get()
    if names is not None and (others := item.keys() - set(read)):
        place = _INDEX.sub("[]", where)
        names.update(f"{place}.{key}" for key in others if is_filled(item[key]))


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


def parse_text(value: Any, where: str) -> str:
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
    return "" if value is None else parse_text(value, field)


def read_answer(value: Any, where: str) -> str:
    """Return the text of an answer; raise EmptyAnswerError if it is blank."""
    text = parse_text(value, where)
    if is_blank(text):
        raise EmptyAnswerError(
            f"{where} is empty: there is no answer to train on; drop the row, {SKIP_EMPTY}"
        )
    return text


def is_blank(text: str) -> bool:
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
    key = next((key for key in ("text", "value", name) if part.get(key) is not None), "")
    note_unread(part, ("type", key, *MASK_KEYS), where)
    value = part[key] if key else None
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


def parse_json(text: str, where: str) -> Any:
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
        value = {} if is_blank(value) else parse_json(value, where)
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


def is_flag(value: Any) -> bool:
    """Return whether a value is true or false, or a csv file's text of it."""
    return isinstance(value, bool) or (isinstance(value, str) and value.lower() in _WORDS)


def row_weight(values: RowColumns) -> float:
    """Return the product of the columns that weigh the whole row; they may be text, as in csv.

    A number in a column of FLAGS is not read: it may be anything, such as a measured loss.
    """
    if _ROW_KEYS.isdisjoint(values):
        return 1.0
    weight = 1.0
    for name in WEIGHT_KEYS:
        value = _from_text(values[name]) if name in values else None
        if isinstance(value, str) and value:
            raise RowError(
                f"{name} is {quote(value)}, not a number from 0 up; rename the column if it is not "
                "a weight"
            )
        if value not in (None, ""):
            weight *= read_weight(value, name)
    for name in FLAGS:
        if is_flag(values.peek(name)):
            weight *= float(_from_text(values[name]))
    scale = values.peek("loss_scale")
    if scale not in (None, "") and not isinstance(scale, list):
        weight *= _read_flag(_from_text(values["loss_scale"]), "loss_scale", "loss_scale")
    return float(weight)


def _from_text(value: Any) -> Any:
    """Return the number or the truth value that a csv file's text holds; else `value` itself."""
    if not isinstance(value, str):
        return value
    try:
        return _WORDS[value.lower()] if value.lower() in _WORDS else float(value)
    except ValueError:
        return value


def turn_weight(item: Mapping[str, Any], where: str) -> float | None:
    """Return the weight that a turn, or a segment, gives itself; None without one."""
    if MASK_KEYS.isdisjoint(item):
        return None
    given = {key: value for key, value in item.items() if key in MASK_KEYS and value is not None}
    given.pop("train_detail", None)
    factors = [
        read_weight(value, f"{where}.{key}")
        if key in WEIGHT_KEYS
        else _read_flag(value, f"{where}.{key}", key)
        for key, value in given.items()
    ]
    return math.prod(factors) if factors else None


def read_details(item: Mapping[str, Any], text: Any, where: str) -> Ranges | None:
    """Return the character ranges of an answer that its `train_detail` trains on; None without it.

    Each entry has the offsets of its first and of its last character in `text`, the content as it
    is in the row; characters without an entry are not trained on.
    """
    if not (given := item.get("train_detail")) or text == "":
        return None
    where = f"{where}.train_detail"
    if not isinstance(text, str):
        raise RowError(f"{where} counts characters of a text, and the content is {type_of(text)}")
    if not isinstance(given, list):
        raise RowError(f"{where} is {type_of(given)}, not a list of {_DETAIL}")
    ranges, first = [], 0
    for index, entry in enumerate(given):
        here = f"{where}[{index}]"
        if not isinstance(entry, dict) or entry.keys() != set(_OFFSETS) | {"train"}:
            found = f"has {listed(entry)}" if isinstance(entry, dict) else f"is {type_of(entry)}"
            raise RowError(f"{here} {found}; give {_DETAIL}")
        for key in _OFFSETS:
            if type(entry[key]) is not int:
                raise RowError(
                    f"{here}.{key} is {quote(entry[key])}; give the number of a character"
                )
        begin, end = (entry[key] for key in _OFFSETS)
        if not first <= begin <= end < len(text):
            raise RowError(
                f"{here} is characters {begin:,} to {end:,}; expected offsets from {first:,} to "
                f"{len(text) - 1:,}: entries in order, and end_offset the last character of a part"
            )
        first = end + 1
        if _read_flag(entry["train"], f"{here}.train"):
            ranges.append((begin, first))
    return tuple(ranges)


def check_no_details(item: Mapping[str, Any], where: str, what: str) -> None:
    """Raise RowError for the `train_detail` of what is no answer in plain text."""
    if item.get("train_detail"):
        raise RowError(
            f"{where}.train_detail trains on characters of an answer, but this is {what}; set "
            "'train' for the whole, or write the row as segments of text and weight"
        )


def _read_flag(value: Any, where: str, key: str = "train") -> float:
    if value not in (0, 1):
        fix = "give true or false"
        if key == "loss_scale":
            fix = "only 0 and 1 are read here: give other numbers as 'weight'"
        raise RowError(f"{where} is {quote(value)}; {fix}")
    return float(value)


def apply_turn_masks(turns: Sequence[Turn], values: RowColumns, name: str) -> list[Turn]:
    """Return the turns of the column `name`, weighed by the columns that list a value a turn.

    Raises RowError if a list has another length.
    """
    masked = list(turns)
    if _TURN_COLUMNS.isdisjoint(values):
        return masked
    for column in TURN_MASKS:
        if not isinstance(values.peek(column), list) or not (mask := values[column]):
            continue
        if len(mask) != len(masked):
            raise RowError(
                f"{column} has {len(mask):,} values and {name} {len(masked):,} turns; give "
                "one for each turn, or 'train: false' on the turns themselves"
            )
        for index, turn in enumerate(masked):
            factor = _read_flag(mask[index], f"{column}[{index}]", column)
            weight = factor if turn.weight is None else turn.weight * factor
            masked[index] = replace(turn, weight=weight)
    return masked


def check_no_token_mask(values: Mapping[str, Any], *, has_turns: bool) -> None:
    """Raise RowError for a mask of tokens in a row of text, whose tokens nobody has counted.

    Beside `input_ids` it belongs to them.
    """
    if "input_ids" in values:
        return
    masks = {name for name in TOKEN_MASKS if name in values}
    if not has_turns:
        masks.update(name for name in TURN_MASKS if isinstance(values.get(name), list))
    for name in sorted(masks):
        value = values[name]
        is_read = name in TURN_MASKS and isinstance(value, list) if has_turns else False
        is_scalar = name == "loss_scale" and not isinstance(value, list)
        if value in (None, "", []) or is_read or is_scalar:
            continue
        raise RowError(
            f"{name} is {type_of(value)}: a mask of tokens, but this row is text; give the tokens "
            "as input_ids (format: pretokenized), or remove the column to train on all answers"
        )


def check_whole(item: Mapping[str, Any], where: str) -> None:
    """Raise RowError if a part of a turn says that it is not trained on as the rest is."""
    if MASK_KEYS.isdisjoint(item):
        return
    for key in MASK_KEYS & item.keys():
        if item[key] is not None and item[key] != 1 and item[key] != []:
            raise RowError(
                f"{where}.{key} is {quote(item[key])}; only a whole turn can be masked: set it on "
                "the turn, or write the row as segments of text and weight"
            )


def read_tokens(values: RowColumns, origin: Origin) -> list[Item]:
    """Return the ids and weights of each document; the weights of all masks are multiplied.

    Tokens masked by `attention_mask` are padding at either end, which is removed. Labels are not
    shifted: each has the position of its own token, -100 for tokens that are not trained on.
    """
    ids = _integers(values["input_ids"], "input_ids")
    if not ids:
        raise RowError("input_ids is empty; give at least one token")
    if min(ids) < 0 or max(ids) > _MAX_ID:
        place = next(i for i, token in enumerate(ids) if not 0 <= token <= _MAX_ID)
        raise RowError(
            f"input_ids[{place}] is {quote(ids[place])}; an id is a number from 0 to {_MAX_ID}"
        )
    first, end = _find_padding(values, len(ids))
    weights = [row_weight(values)] * len(ids)
    if values.get("labels") is not None:
        weights = _label_weights(values["labels"], ids, weights, first, end)
    for name in MASKS[1:]:
        is_of_row = name == "loss_scale" and not isinstance(values.get(name), list)
        if values.get(name) is not None and not is_of_row:
            factors = _check_list(values[name], name, len(ids))
            weights = [
                weight * read_weight(factor, name)
                for weight, factor in zip(weights, factors, strict=True)
            ]
    bounds = [*_find_documents(values, len(ids), first, end), end]
    return [
        Tokens(tuple(ids[start:stop]), tuple(weights[start:stop]), origin)
        for start, stop in itertools.pairwise(bounds)
    ]


def _find_documents(values: Mapping[str, Any], count: int, first: int, end: int) -> list[int]:
    """Return where the documents between `first` and `end` begin.

    Raises RowError if two columns disagree, or one does not fit the tokens.
    """
    found: dict[str, list[int]] = {}
    if values.get("position_ids") is not None:
        positions = _integers(values["position_ids"], "position_ids", count)
        found["position_ids"] = _restarts(positions, first, end)
    if values.get("seq_lengths") is not None:
        lengths = _integers(values["seq_lengths"], "seq_lengths")
        found["seq_lengths"] = _starts(lengths, "seq_lengths", count, first, end)
    if values.get("cu_seqlens") is not None:
        ends = _integers(values["cu_seqlens"], "cu_seqlens")
        lengths = [b - a for a, b in itertools.pairwise(ends)]
        found["cu_seqlens"] = _starts(lengths, "cu_seqlens", count, first, end)
    for name in DOCUMENT_IDS:
        if values.get(name) is not None:
            ids = _integers(values[name], name, count)
            found[name] = [i for i in range(first, end) if i == first or ids[i] != ids[i - 1]]
    for (one, starts), (other, others) in itertools.pairwise(found.items()):
        if starts != others:
            raise RowError(
                f"{one} and {other} tell different documents apart ({len(starts):,} and "
                f"{len(others):,} of them); keep the right one"
            )
    return next(iter(found.values()), [first])


def _restarts(positions: list[int], first: int, end: int) -> list[int]:
    """Return the places of position 0; raise RowError if others do not count on by 1."""
    for i in range(first, end):
        before = positions[i - 1] if i > first else -1
        if positions[i] not in (0, before + 1):
            raise RowError(
                f"position_ids[{i}] is {quote(positions[i])}; positions count from 0 in each "
                "document of a row; drop the column if the row is one document"
            )
    return [i for i in range(first, end) if positions[i] == 0]


def _starts(lengths: list[int], name: str, count: int, first: int, end: int) -> list[int]:
    """Return where documents of these lengths begin, with or without the row's padding."""
    total = sum(lengths)
    if total not in (count, end - first) or min(lengths, default=0) < 1:
        raise RowError(
            f"{name} tells documents of {total:,} tokens together, input_ids has {count:,}; give "
            "the number of tokens of each document"
        )
    offset = first if total == end - first else 0
    starts = itertools.accumulate(lengths[:-1], initial=offset)
    return sorted({max(first, start) for start in starts if start < end})


def _find_padding(values: Mapping[str, Any], count: int) -> tuple[int, int]:
    """Return the end of the padding before the tokens, and the start of that after them."""
    if values.get("attention_mask") is None:
        return 0, count
    mask = _integers(values["attention_mask"], "attention_mask", count)
    if 1 not in mask:
        raise RowError("attention_mask masks every token; drop the row")
    first, end = mask.index(1), count - mask[::-1].index(1)
    if any(mask[:first]) or any(mask[end:]) or mask[first:end] != [1] * (end - first):
        raise RowError(
            "attention_mask is not one run of 1 with 0 at its ends; give one document per row: "
            "loft packs documents itself"
        )
    return first, end


def _label_weights(
    value: Any, ids: list[int], weights: list[float], first: int, end: int
) -> list[float]:
    labels = _integers(value, "labels", len(ids))
    if labels == ids:
        return weights
    label_weights = [
        0.0 if label == _IGNORED else weight if label == token else -1.0
        for label, token, weight in zip(labels, ids, weights, strict=True)
    ]
    if -1.0 in label_weights[first:end]:
        place = label_weights.index(-1.0, first)
        raise RowError(
            f"labels[{place}] is {labels[place]} and input_ids[{place}] is {ids[place]}; labels "
            f"must equal input_ids (they are not shifted) or be {_IGNORED}"
        )
    return label_weights


def _integers(value: Any, name: str, count: int | None = None) -> list[int]:
    _check_list(value, name)
    if not set(map(type, value)) <= {int}:
        place = next(i for i, number in enumerate(value) if type(number) is not int)
        raise RowError(f"{name}[{place}] is {type_of(value[place])}, not a whole number")
    return _check_list(value, name, count)


def _check_list(value: Any, name: str, count: int | None = None) -> list[Any]:
    if not isinstance(value, list):
        raise RowError(f"{name} is {type_of(value)}, not a list of numbers")
    if count is not None and len(value) != count:
        raise RowError(
            f"{name} has {len(value):,} numbers and input_ids {count:,}; give one per token"
        )
    return value
