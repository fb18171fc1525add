"""Read rows with a label: an answer with a verdict, a text with its class, a preference pair.

Decides what the answer of a row is, what the prompt of a pair is, and which other row's answer
stands for any answer to its prompt, by which the drift from the base is measured. Nothing of the
prompt is trained on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from common.errors import Origin
from data_modules.format.columns import VERDICTS
from data_modules.format.fields import (
    RowError,
    is_turns,
    quote,
    read_answer,
    read_optional_text,
    read_text,
    row_weight,
)
from data_modules.format.turns import normalize_turns, read_tools, read_turns
from data_modules.types import Conversation, Document, Item, Segment, Turn

KTO, CLASSIFICATION = "kto", "classification"
CLASS_COLUMNS = ("label", "labels", "class", "score")
"""columns of the class of a text, or of its number"""
_VERDICTS = {"true": 1.0, "1": 1.0, "1.0": 1.0, "false": 0.0, "0": 0.0, "0.0": 0.0}
PREFERENCE = "preference"
PROMPTS = ("prompt", "instruction", "question", "messages", "conversations")
"""columns of the prompt, in the order in which they are looked for; `instruction` may have an
`input`, as in alpaca's rows"""
_OF_TEXT = ("instruction", "question")
ANSWERS = ("chosen", "rejected")


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


def label_text(label: float, labels: Sequence[str], *, is_multi_label: bool) -> str:
    """Return what `label_of`, or `labels_of` with `is_multi_label`, has read, as text."""
    if is_multi_label:
        own = [name for index, name in enumerate(labels) if int(label) >> index & 1]
        return ", ".join(own) or "none"
    return labels[int(label)] if len(labels) > 1 else f"{label:g}"


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


def unused_prompts(columns: Iterable[str]) -> set[str]:
    """Return the columns that could hold a prompt, or more of it, beside the one that is read."""
    found = [name for name in PROMPTS if name in columns]
    return {*found[1:], *(() if found[:1] == ["instruction"] else ("input",))}


def read_pair(values: Mapping[str, Any], origin: Origin) -> list[Item]:
    """Return the conversations or documents of the chosen and of the rejected answer."""
    name = next((name for name in PROMPTS if values.get(name) is not None), None)
    prompt = None if name is None else values[name]
    answers = {answer: values[answer] for answer in ANSWERS}
    if name == "prompt" and all(isinstance(text, str) for text in (prompt, *answers.values())):
        return [_document(values, answer, origin) for answer in ANSWERS]
    turns = {answer: _answer_turns(value, answer) for answer, value in answers.items()}
    before = _prompt_turns(values, name)
    if turns["chosen"][0].role != "assistant":  # each answer is a whole conversation
        before, turns = _split_prompt(before, turns)
    if not before:
        raise RowError(
            "chosen and rejected have no prompt before them: give it in a column 'prompt', or as "
            "the turns with which both begin"
        )
    for answer, own in turns.items():
        if own[-1].role != "assistant":
            raise RowError(f"{answer} ends with a turn of the {own[-1].role}, not with an answer")
    # An answer of the prompt is the same for both: nothing can be learned from it.
    masked = [replace(turn, weight=0.0) if turn.role == "assistant" else turn for turn in before]
    weight, tools, margin = row_weight(values), read_tools(values), _read_margin(values)
    system = read_optional_text(values, "system")
    return [
        Conversation(
            normalize_turns(masked + turns[answer], f"prompt + {answer}", system),
            origin,
            tools,
            weight,
            label=margin,
        )
        for answer in ANSWERS
    ]


def _document(values: Mapping[str, Any], answer: str, origin: Origin) -> Document:
    prompt = Segment(read_text(values["prompt"], "prompt"), 0.0)
    return Document(
        (prompt, Segment(read_answer(values[answer], answer), row_weight(values))),
        origin,
        _read_margin(values),
    )


def _read_margin(values: Mapping[str, Any]) -> float | None:
    """Return by how much the chosen answer is better, None if the row does not say."""
    margin = values.get("margin")
    if margin in (None, ""):
        return None
    try:
        number = float(margin)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise RowError(f"margin is {quote(margin)}; write a number, or leave the column out")
    return number


def _answer_turns(value: Any, name: str) -> list[Turn]:
    """Return the turns of an answer: a text, one turn, or several."""
    if isinstance(value, dict) and is_turns([value]):
        value = [value]
    if is_turns(value):
        return read_turns(value, name)
    return [Turn("assistant", read_answer(value, name))]


def _prompt_turns(values: Mapping[str, Any], name: str | None) -> list[Turn]:
    """Return the turns in the prompt's column, none without one."""
    if name is None:
        return []
    if is_turns(values[name]) and name not in _OF_TEXT:
        return read_turns(values[name], name)
    text = read_text(values[name], name)
    if name == "instruction" and (extra := read_optional_text(values, "input").strip()):
        text = f"{text}\n\n{extra}" if text else extra
    return [Turn("user", text)]


def _split_prompt(
    prompt: list[Turn], turns: dict[str, list[Turn]]
) -> tuple[list[Turn], dict[str, list[Turn]]]:
    """Take the turns with which both conversations begin as the prompt; RowError if none."""
    chosen, rejected = turns["chosen"], turns["rejected"]
    # The last turn of each is its answer, even where both are the same.
    most = min(len(chosen), len(rejected)) - 1
    shared = next((i for i in range(most) if chosen[i] != rejected[i]), most)
    while shared and chosen[shared - 1].role == "assistant":
        shared -= 1  # answers that are the same begin to differ in what the assistant goes on with
    if not shared:
        raise RowError(
            f"chosen begins with '{_short(chosen[0])}' and rejected with '{_short(rejected[0])}': "
            "the answers of a pair need the same prompt before them; make these turns the same, or "
            "set data.on_bad_row=quarantine to leave such rows out"
        )
    if prompt and prompt[-1].content.strip() != chosen[shared - 1].content.strip():
        raise RowError(
            f"the prompt ends with '{_short(prompt[-1])}', the turns before the answers with "
            f"'{_short(chosen[shared - 1])}'; give one of them, or make them the same"
        )
    return chosen[:shared], {name: own[shared:] for name, own in turns.items()}


def _short(turn: Turn) -> str:
    return turn.content if len(turn.content) <= 40 else f"{turn.content[:40]}..."
