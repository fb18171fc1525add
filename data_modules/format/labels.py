"""Read rows with a label: an answer with a verdict, or a text with its class.

Decides what the answer of a row is, and which other row's answer stands for any answer to its
prompt, by which the drift from the base is measured. Nothing of the prompt is trained on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from data_modules.format.columns import VERDICTS
from data_modules.format.fields import RowError, quote
from data_modules.types import Conversation, Document, Item

KTO, CLASSIFICATION = "kto", "classification"
CLASS_COLUMNS = ("label", "labels", "class", "score")
"""columns of the class of a text, or of its number"""
_VERDICTS = {"true": 1.0, "1": 1.0, "1.0": 1.0, "false": 0.0, "0": 0.0, "0.0": 0.0}


def read_verdict(values: Mapping[str, Any]) -> float:
    """Return 1 for an answer that is wanted and 0 for another one, also from a csv file's text."""
    name = next(name for name in VERDICTS if name in values)
    verdict = _VERDICTS.get(str(values[name]).lower())
    if verdict is None:
        raise RowError(
            f"{name} is {quote(values[name])}; write true for an answer that is wanted, and false "
            "for one that is not"
        )
    return verdict


def with_verdict(item: Item, verdict: float, *, only_last: bool) -> Item:
    """Return a conversation or document with its verdict.

    `only_last`: answers before the last one count only if the row gives them a weight.
    """
    if isinstance(item, Conversation):
        *before, answer = item.turns
        if answer.role != "assistant":
            raise RowError(f"the row ends with a turn of the {answer.role}, not with an answer")
        turns = [
            replace(turn, weight=0.0) if turn.role == "assistant" and turn.weight is None else turn
            for turn in (before if only_last else ())
        ] or before
        return replace(item, turns=(*turns, answer), label=verdict)
    if isinstance(item, Document):
        return replace(item, label=verdict)
    raise RowError("rows that are tokenized have no answer; give text, or turns")


def read_class(values: Mapping[str, Any]) -> str | tuple[str, ...]:
    """Return the name of a class, or a number, as text; a tuple of a list of classes."""
    name = next(name for name in CLASS_COLUMNS if name in values)
    value = values[name]
    if isinstance(value, list):
        return tuple(str(_class_text(name, each)) for each in value)
    return _class_text(name, value)


def _class_text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)) or (isinstance(value, str) and value.strip()):
        return str(value).strip()
    raise RowError(f"{name} is {quote(value)}; write the name of a class, or a number")


def label_of(text: str | tuple[str, ...], labels: Sequence[str]) -> float:
    """Return the index of a class in `labels`, or the number where there is only one of them."""
    if isinstance(text, tuple):
        raise RowError(
            "label is a list; write the name of one class, or type model.multi_label=true"
        )
    if len(labels) == 1:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if math.isfinite(number):
            return number
        raise RowError(
            f"label is {quote(text)}, and model.labels=[{labels[0]}] is for numbers; write a "
            "number, or type model.labels=[NAME, NAME] with the names of the classes"
        )
    known = {label.casefold(): index for index, label in enumerate(labels)}
    if (index := known.get(text.casefold())) is None:
        raise RowError(
            f"label is {quote(text)}; model.labels has {', '.join(labels)}: type it with this one, "
            "too"
        )
    return float(index)


def labels_of(text: str | tuple[str, ...], labels: Sequence[str]) -> float:
    """Return the classes of a text as the bits of a whole number, the first of `labels` the lowest.

    A text names one class.
    """
    found = {int(label_of(each, labels)) for each in ((text,) if isinstance(text, str) else text)}
    return float(sum(1 << index for index in found))


def with_other_answers(rows: Mapping[int, list[Item]]) -> dict[int, list[Item]]:
    """Return the item of each row, then its prompt with the answer of the next row of its kind.

    The last row has the answer of the first, and a row alone its own.
    """
    by_kind: dict[type, list[Item]] = {}
    for (item,) in rows.values():
        by_kind.setdefault(type(item), []).append(item)
    following = {kind: iter([*items[1:], items[0]]) for kind, items in by_kind.items()}
    return {
        number: [item, _answered(item, next(following[type(item)]))]
        for number, (item,) in rows.items()
    }


def _answered(item: Item, other: Item) -> Item:
    if isinstance(item, Conversation) and isinstance(other, Conversation):
        return replace(item, turns=(*item.turns[:-1], other.turns[-1]))
    if isinstance(item, Document) and isinstance(other, Document):
        return replace(item, segments=(item.segments[0], other.segments[-1]))
    raise TypeError(f"{type(item).__name__} and {type(other).__name__} have no answers")
