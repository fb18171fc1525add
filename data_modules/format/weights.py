"""Read which rows, turns and pieces of text are trained on, by the keys that data sets use for it.

Several keys of one row or turn are multiplied. A key that says something that cannot be followed
(half a turn, a mask of tokens beside text) is an error, never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from common.text import listed
from data_modules.format.fields import RowError, quote, read_weight, type_of
from data_modules.types import Ranges, Turn

FLAGS = ("train", "training", "loss")
"""keys of a turn or a row with true or false"""
WEIGHTS = ("weight", "loss_weight")
"""keys of a turn or a row with a number from 0 up"""
TURN_MASKS = ("loss_mask", *FLAGS, "loss_scale")
"""columns that may hold a list with a value for each turn"""
_TURN_COLUMNS = frozenset(TURN_MASKS)
TOKEN_MASKS = ("loss_mask", "completion_mask", "assistant_masks", "assistant_mask", "loss_scale")
"""columns that hold a value for each token"""
_ROW_KEYS = frozenset((*WEIGHTS, *FLAGS, "loss_scale"))
"""columns that weigh the whole row"""
MASK_KEYS = frozenset((*FLAGS, *WEIGHTS, "loss_scale", "train_detail"))
"""keys by which a turn says whether it is trained on"""
_WORDS = {"true": True, "false": False}
_OFFSETS = ("begin_offset", "end_offset")
_DETAIL = "{begin_offset: 0, end_offset: LAST_CHARACTER, train: true}"


def is_flag(value: Any) -> bool:
    """Return whether a value is true or false, or a csv file's text of it."""
    return isinstance(value, bool) or (isinstance(value, str) and value.lower() in _WORDS)


def row_weight(values: Mapping[str, Any]) -> float:
    """Return the product of the columns that weigh the whole row; they may be text, as in csv.

    A number in a column of FLAGS is not read: it may be anything, such as a measured loss.
    """
    if _ROW_KEYS.isdisjoint(values):
        return 1.0
    weight = math.prod(
        _row_number(values[name], name)
        for name in WEIGHTS
        if name in values and values[name] not in (None, "")
    )
    for name in FLAGS:
        if name in values and is_flag(values[name]):
            weight *= float(_from_text(values[name]))
    scale = values.get("loss_scale")
    if scale not in (None, "") and not isinstance(scale, list):
        weight *= _read_scale(_from_text(scale), "loss_scale")
    return float(weight)


def _row_number(value: Any, name: str) -> float:
    value = _from_text(value)
    if isinstance(value, str):
        raise RowError(
            f"{name} is {quote(value)}, not a number from 0 up; rename the column if it is not a "
            "weight"
        )
    return read_weight(value, name)


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
    factors = [_read_factor(key, value, f"{where}.{key}") for key, value in given.items()]
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


def _read_factor(key: str, value: Any, where: str) -> float:
    if key in WEIGHTS:
        return read_weight(value, where)
    return _read_scale(value, where) if key == "loss_scale" else _read_flag(value, where)


def _read_flag(value: Any, where: str) -> float:
    """Return 1 for true and 0 for false; raise RowError for other values."""
    if value not in (0, 1):
        raise RowError(f"{where} is {quote(value)}; give true or false")
    return float(value)


def _read_scale(value: Any, where: str) -> float:
    if value not in (0, 1):
        raise RowError(
            f"{where} is {quote(value)}; only 0 and 1 are read here: give other numbers as 'weight'"
        )
    return float(value)


def apply_turn_masks(turns: Sequence[Turn], values: Mapping[str, Any], name: str) -> list[Turn]:
    """Return the turns of the column `name`, weighed by the columns that list a value a turn.

    Raises RowError if a list has another length.
    """
    masked = list(turns)
    if _TURN_COLUMNS.isdisjoint(values):
        return masked
    for column in TURN_MASKS:
        mask = values.get(column)
        if not isinstance(mask, list) or not mask:
            continue
        if len(mask) != len(masked):
            raise RowError(
                f"{column} has {len(mask):,} values and {name} {len(masked):,} turns; give "
                "one for each turn, or 'train: false' on the turns themselves"
            )
        read = _read_scale if column == "loss_scale" else _read_flag
        for index, turn in enumerate(masked):
            factor = read(mask[index], f"{column}[{index}]")
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
