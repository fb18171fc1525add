"""Turn a row into conversations, documents or tokens, by the name of its format.

Decides which columns a format reads and what they become: a conversation, raw text or tokens.
Never tokenizes and never reads files.

Rules for conversations: roles go by their usual names (`human`, `gpt`, ...); neighbours of one
role are joined (turns.py says how); a system turn comes first; a user turn comes before the first
answer; the result of a tool follows its call. `columns` in the settings maps a format's field to
the column that holds it, or to a dotted path into one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data_modules.format.fields import (
    MissingColumnError,
    RowError,
    is_turns,
    kind,
    misnamed,
    nearest,
    quoted,
    read_answer,
    read_optional_text,
    read_path,
    read_text,
    read_weight,
    row_weight,
    suggest_settings,
)
from data_modules.format.turns import arrange, read_tools, read_tree, read_turns
from data_modules.messages import DataError, Origin, listed
from data_modules.types import Conversation, Document, Item, Row, Segment, Tokens, Turn

_ANSWERS = ("output", "response", "completion")
_COMPLETIONS = ("completion", "response", "output")
_TURNS = ("messages", "conversations", "conversation")
_SLIP = 0.9
"""how alike two names are that differ by one letter"""
_FLAT_TREE = {"parent_id", "role", "text"}
IGNORED = -100
"""the label of a token that is not trained on"""
_MAX_ID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Format:
    """Describe a format: its fields with their aliases, and the function that reads a row.

    `guessed_by` are columns that no other format has: without them it is not guessed.
    """

    name: str
    required: tuple[tuple[str, ...], ...]
    optional: tuple[str, ...]
    read: Callable[[Mapping[str, Any], Origin], list[Item]]
    guessed_by: tuple[str, ...] = ()

    def fields(self) -> list[str]:
        """Return all names that `columns` can map, aliases included."""
        names = [name for names in self.required for name in names]
        return [*names, *self.optional, "weight"]

    def fits(self, columns: Iterable[str]) -> bool:
        """Tell whether `columns` hold every required field, and what it is guessed by."""
        present = set(columns)
        known = all(present.intersection(names) for names in self.required)
        return known and present.issuperset(self.guessed_by)


def format_of(columns: Iterable[str]) -> str | None:
    """Return the name of the first format whose required fields are all in `columns`.

    Rows that are single messages of a tree are of none: each alone says nothing to train on.
    """
    present = set(columns)
    if present >= _FLAT_TREE:
        return None
    return next((name for name, form in FORMATS.items() if form.fits(present)), None)


_PREFERENCES = {"chosen", "rejected"}


def guess_format(rows: Sequence[Row], columns: Mapping[str, str]) -> str:
    """Return the format of most rows; raises DataError where the first, and most, are of none."""
    votes: Counter[str] = Counter()
    unknown: dict[int, str] = {}
    for number, row in enumerate(rows):
        try:
            values = apply_columns(row.values, columns)
        except MissingColumnError as error:
            unknown[number] = f"{row.origin} {error}"
            continue
        name = format_of(values)
        if name is None:
            if _PREFERENCES.issubset(values):
                raise DataError(
                    f"{row.origin} columns {listed(row.values)}: preference pairs, as for DPO, "
                    "which are not trained on here; to train on the answers that were chosen, type "
                    "{path: ..., format: prompt_completion, columns: {completion: chosen}}"
                )
            suggestion = suggest_settings(row.values)
            example = "as in {instruction: question, output: answer}"
            unknown[number] = (
                f"{row.origin} columns {listed(row.values)}: format not recognized"
                f"{_near_field(values)}; set data.datasets[].format to one of "
                f"{', '.join(FORMATS)}, and name the columns by data.datasets[].columns"
                + (f"; try {suggestion}" if suggestion else f", {example}")
            )
        else:
            votes[name] += 1
    for name, count in votes.most_common(1):
        if count >= len(unknown) or 0 not in unknown:
            return name
    raise DataError(unknown[0])


def _near_field(columns: Iterable[str]) -> str:
    """Return "; 'message' is near: did you mean 'messages'?" for a slip in a column's name."""
    found = list(columns)
    lacking = (names for form in FORMATS.values() for names in form.required)
    names = [name for group in lacking if not set(group) & set(found) for name in group]
    return next((hint for name in names if (hint := misnamed(name, found, _SLIP))), "")


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


def convert_row(row: Row, name: str, columns: Mapping[str, str]) -> list[Item]:
    """Read `row` as format `name`: one item, or several from a tree.

    Raises RowError when the row does not hold it; MissingColumnError, which counts by columns, and
    EmptyAnswerError are kinds of it.
    """
    form = FORMATS[name]
    values = row.values
    if columns:
        values = _without_aliases(apply_columns(values, columns), form, columns)
    for names in form.required:
        for field in names:
            if field in values:
                break
        else:
            raise _missing(names, row.values)
    return form.read(values, row.origin)


def apply_columns(values: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Return `values` with the mapped columns under their field's name.

    Raises MissingColumnError, which names the deepest part of a dotted path that is there.
    """
    if not columns:
        return values
    mapped = {
        field: read_path(values, path, f"data.datasets[].columns.{field}")
        for field, path in columns.items()
    }
    taken = set(columns.values())
    return {name: value for name, value in values.items() if name not in taken} | mapped


def _without_aliases(
    values: dict[str, Any], form: Format, columns: Mapping[str, str]
) -> dict[str, Any]:
    """Return `values` without the other names of a field that `columns` maps: that one counts."""
    others = {
        name
        for names in form.required
        if not columns.keys().isdisjoint(names)
        for name in names
        if name not in columns
    }
    return {name: value for name, value in values.items() if name not in others}


def _missing(names: tuple[str, ...], columns: Mapping[str, Any]) -> MissingColumnError:
    hint = next((hint for name in names if (hint := misnamed(name, columns))), "")
    return MissingColumnError(f"missing '{names[0]}'; found {listed(columns)}{hint}", columns)


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    known = list(dict.fromkeys(known))
    return nearest(name, known, otherwise=f"; use one of {', '.join(known)}")


def _first(values: Mapping[str, Any], names: Iterable[str]) -> tuple[str, Any]:
    return next((name, values[name]) for name in names if name in values)


def _read_alpaca(values: Mapping[str, Any], origin: Origin) -> list[Item]:
    question, input_start = read_text(values["instruction"], "instruction"), 0
    if extra := read_optional_text(values, "input").strip():
        question, input_start = (
            (f"{question}\n\n{extra}", len(question) + 2) if question else (extra, 0)
        )
    name, answer = _first(values, _ANSWERS)
    turns = [
        Turn("user", question, input_start=input_start),
        Turn("assistant", read_answer(answer, name)),
    ]
    if values.get("history"):
        turns = _read_history(values["history"]) + turns
    if system := read_optional_text(values, "system"):
        turns.insert(0, Turn("system", system))
    return [Conversation(tuple(turns), origin, weight=row_weight(values))]


def _read_history(history: Any) -> list[Turn]:
    if not isinstance(history, list):
        raise RowError(f"history is {kind(history)}, not a list of [question, answer]")
    turns = []
    for index, pair in enumerate(history):
        where = f"history[{index}]"
        if not isinstance(pair, list) or len(pair) != 2:
            raise RowError(f"{where} is {kind(pair)}, not [question, answer]")
        turns.append(Turn("user", read_text(pair[0], f"{where}[0]")))
        turns.append(Turn("assistant", read_answer(pair[1], f"{where}[1]")))
    return turns


def _read_messages(values: Mapping[str, Any], origin: Origin) -> list[Item]:
    name, items = _first(values, _TURNS)
    turns = arrange(read_turns(items, name), name, read_optional_text(values, "system"))
    return [Conversation(turns, origin, read_tools(values), row_weight(values))]


def _read_prompt_completion(values: Mapping[str, Any], origin: Origin) -> list[Item]:
    prompt = values["prompt"]
    name, answer = _first(values, _COMPLETIONS)
    if is_turns(prompt) or is_turns(answer):
        return [_read_prompt_turns(prompt, answer, name, values, origin)]
    question = Segment(read_text(prompt, "prompt"), 0.0)
    return [Document((question, Segment(read_answer(answer, name), row_weight(values))), origin)]


def _read_prompt_turns(
    prompt: Any, answer: Any, name: str, values: Mapping[str, Any], origin: Origin
) -> Conversation:
    """Return prompt and completion as one conversation; answers in the prompt are masked."""
    if not (is_turns(prompt) and is_turns(answer)):
        raise RowError(f"prompt is {kind(prompt)} and {name} {kind(answer)}; give turns in both")
    prompt_turns = [
        Turn(turn.role, turn.content, 0.0, turn.reasoning, turn.tool_calls)
        if turn.role == "assistant"
        else turn
        for turn in read_turns(prompt, "prompt")
    ]
    turns = arrange(prompt_turns + read_turns(answer, name), f"prompt + {name}")
    return Conversation(turns, origin, read_tools(values), row_weight(values))


def _read_completion(values: Mapping[str, Any], origin: Origin) -> list[Item]:
    name, value = _first(values, ("segments", "text", "content"))
    weight = row_weight(values)
    if name != "segments":
        return [Document((Segment(read_text(value, name), weight),), origin)]
    if not isinstance(value, list) or not value:
        raise RowError("segments is not a list with at least one {text, weight}")
    return [Document(tuple(_read_segment(item, i, weight) for i, item in enumerate(value)), origin)]


def _read_segment(item: Any, index: int, row_weight: float) -> Segment:
    where = f"segments[{index}]"
    if not isinstance(item, dict) or "text" not in item:
        raise RowError(f"{where} is not {{text, weight}}")
    weight = read_weight(item.get("weight", 1.0), f"{where}.weight")
    return Segment(read_text(item["text"], f"{where}.text"), weight * row_weight)


def _read_pretokenized(values: Mapping[str, Any], origin: Origin) -> list[Item]:
    return [read_tokens(values, origin)]


def _read_oasst(values: Mapping[str, Any], origin: Origin) -> list[Item]:
    return [*read_tree(values["prompt"], origin, row_weight(values))]


FORMATS: dict[str, Format] = {
    form.name: form
    for form in (
        Format("messages", (("messages",),), ("system", "tools", "functions"), _read_messages),
        Format(
            "sharegpt",
            (("conversations", "conversation"),),
            ("system", "tools", "functions"),
            _read_messages,
        ),
        Format(
            "alpaca",
            (("instruction",), _ANSWERS),
            ("input", "system", "history"),
            _read_alpaca,
        ),
        Format(
            "pretokenized",
            (("input_ids",), ("labels", "loss_mask", "weights")),
            ("attention_mask",),
            _read_pretokenized,
        ),
        Format(
            "prompt_completion",
            (("prompt",), _COMPLETIONS),
            ("tools", "functions"),
            _read_prompt_completion,
        ),
        Format("oasst", (("prompt",),), (), _read_oasst, guessed_by=("message_tree_id",)),
        Format("completion", (("text", "content", "segments"),), (), _read_completion),
    )
}


def read_tokens(values: Mapping[str, Any], origin: Origin) -> Tokens:
    """Return ids and weights; `labels`, `loss_mask` and `weights` multiply where several are given.

    Tokens that `attention_mask` hides are padding, at either end, and are cut off. Labels stand at
    the place of their token (not shifted), -100 where nothing is trained on.
    """
    ids = _integers(values["input_ids"], "input_ids")
    if not ids:
        raise RowError("input_ids is empty; give at least one token")
    if min(ids) < 0 or max(ids) > _MAX_ID:
        place = next(i for i, token in enumerate(ids) if not 0 <= token <= _MAX_ID)
        raise RowError(
            f"input_ids[{place}] is {quoted(ids[place])}; an id is a number from 0 to {_MAX_ID}"
        )
    first, end = _visible(values, len(ids))
    weights = [row_weight(values)] * len(ids)
    if values.get("labels") is not None:
        weights = _label_weights(values["labels"], ids, weights, first, end)
    for name in ("loss_mask", "weights"):
        if values.get(name) is not None:
            factors = _numbers(values[name], name, len(ids))
            weights = [a * b for a, b in zip(weights, factors, strict=True)]
    return Tokens(tuple(ids[first:end]), tuple(weights[first:end]), origin)


def _visible(values: Mapping[str, Any], count: int) -> tuple[int, int]:
    """Return where the tokens begin and end that are not padding."""
    if values.get("attention_mask") is None:
        return 0, count
    mask = _integers(values["attention_mask"], "attention_mask")
    _check_length(mask, "attention_mask", count)
    if 1 not in mask:
        raise RowError("attention_mask hides every token; drop the row")
    first, end = mask.index(1), count - mask[::-1].index(1)
    if any(mask[:first]) or any(mask[end:]) or mask[first:end] != [1] * (end - first):
        raise RowError(
            "attention_mask is not one run of 1 with 0 at its ends; give one document a row, for "
            "documents are packed here"
        )
    return first, end


def _label_weights(
    value: Any, ids: list[int], weights: list[float], first: int, end: int
) -> list[float]:
    labels = _integers(value, "labels")
    _check_length(labels, "labels", len(ids))
    if labels == ids:
        return weights
    labelled = [
        0.0 if label == IGNORED else weight if label == token else -1.0
        for label, token, weight in zip(labels, ids, weights, strict=True)
    ]
    if -1.0 in labelled[first:end]:
        place = labelled.index(-1.0, first)
        raise RowError(
            f"labels[{place}] is {labels[place]} and input_ids[{place}] is {ids[place]}; a label "
            f"is its own token, not the next one, or {IGNORED}"
        )
    return labelled


def _integers(value: Any, name: str) -> list[int]:
    if not isinstance(value, list):
        raise RowError(f"{name} is {kind(value)}, not a list of numbers")
    if not set(map(type, value)) <= {int}:
        place = next(i for i, number in enumerate(value) if type(number) is not int)
        raise RowError(f"{name}[{place}] is {kind(value[place])}, not a whole number")
    return value


def _numbers(value: Any, name: str, count: int) -> list[float]:
    if not isinstance(value, list):
        raise RowError(f"{name} is {kind(value)}, not a list of numbers")
    _check_length(value, name, count)
    return [read_weight(number, name) for number in value]


def _check_length(value: list[Any], name: str, count: int) -> None:
    if len(value) != count:
        raise RowError(
            f"{name} has {len(value):,} numbers and input_ids {count:,}; give one a token"
        )
