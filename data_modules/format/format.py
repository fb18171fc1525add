"""Convert a row of a named format to conversations, documents or tokens.

Decides which columns a format reads, which format a row has, and which settings to suggest if no
format is recognized. Never tokenizes and never reads files.

Rules for conversations: roles have their usual names (`human`, `gpt`, ...); consecutive turns of
one role are joined (see turns.py); a system turn comes first; a user turn comes before the first
answer; a tool result follows its call. `columns` in the settings maps a field of the format to a
column, or to a dotted path into one.
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
    nearest_hint,
    quote,
    read_answer,
    read_optional_text,
    read_path,
    read_text,
    read_weight,
    row_weight,
    type_of,
    typo_hint,
)
from data_modules.format.turns import normalize_turns, read_tools, read_tree, read_turns
from data_modules.messages import DataError, Origin, listed
from data_modules.types import Conversation, Document, Item, Row, Segment, Tokens, Turn

_ALPACA_ANSWERS = ("output", "response", "completion")
_COMPLETIONS = ("completion", "response", "output")
_TURNS = ("messages", "conversations", "conversation")
_SLIP = 0.9
"""similarity of two names that differ by one letter"""
_FLAT_TREE = {"parent_id", "role", "text"}
_QUESTIONS = ("instruction", "question", "query", "problem", "prompt", "input", "user", "human")
_ANSWERS = (
    *("output", "answer", "response", "completion", "solution", "answers", "target", "reply"),
    *("assistant", "gpt", "summary"),
)
_EXTRAS = ("input", "context", "passage")
_TEXTS = ("text", "content", "body", "document", "article", "code", "markdown")
_MAX_DEPTH = 3
"""nesting below a column to which texts are searched for suggestions"""
IGNORED = -100
"""label of a token that is not trained on"""
_MAX_ID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Format:
    """A row format: its fields with their aliases, and the function that reads a row.

    `guessed_by` are columns of this format only: it is not guessed without them.
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
        """Return whether `columns` include all required fields and the columns of `guessed_by`."""
        present = set(columns)
        is_complete = all(present.intersection(names) for names in self.required)
        return is_complete and present.issuperset(self.guessed_by)


def format_of(columns: Iterable[str]) -> str | None:
    """Return the name of the first format whose required fields are all in `columns`.

    None for rows that are single messages of a tree: one message alone is nothing to train on.
    """
    present = set(columns)
    if present >= _FLAT_TREE:
        return None
    return next((name for name, form in FORMATS.items() if form.fits(present)), None)


_PREFERENCES = {"chosen", "rejected"}


def guess_format(rows: Sequence[Row], columns: Mapping[str, str]) -> str:
    """Return the format of most rows; raise DataError if the first row and most rows have none."""
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
                    f"{row.origin} columns {listed(row.values)}: preference pairs (as for DPO) are "
                    "not supported; to train on the chosen answers, set "
                    "{path: ..., format: prompt_completion, columns: {completion: chosen}}"
                )
            suggestion = suggest_settings(row.values)
            example = "as in {instruction: question, output: answer}"
            unknown[number] = (
                f"{row.origin} columns {listed(row.values)}: format not recognized"
                f"{_near_field(values)}; set data.datasets[].format to one of "
                f"{', '.join(FORMATS)}, and name the columns in data.datasets[].columns"
                + (f"; try {suggestion}" if suggestion else f", {example}")
            )
        else:
            votes[name] += 1
    for name, count in votes.most_common(1):
        if count >= len(unknown) or 0 not in unknown:
            return name
    raise DataError(unknown[0])


def _near_field(columns: Iterable[str]) -> str:
    """Return a hint if a column differs from a required field of a format by one letter."""
    found = list(columns)
    required = (names for form in FORMATS.values() for names in form.required)
    names = [name for aliases in required if not set(aliases) & set(found) for name in aliases]
    return next((hint for name in names if (hint := typo_hint(name, found, _SLIP))), "")


def check_format(name: str) -> None:
    """Raise ValueError, with the nearest name, if there is no format `name`."""
    if name not in FORMATS:
        raise ValueError(f"format: unknown format '{name}'{_did_you_mean(name, FORMATS)}")


def check_columns(name: str, columns: Mapping[str, str]) -> None:
    """Raise ValueError if `columns` maps a field that the format `name` does not have."""
    fields = FORMATS[name].fields()
    for field in columns:
        if field not in fields:
            raise ValueError(
                f"columns.{field}: format '{name}' has no field '{field}'"
                f"{_did_you_mean(field, fields)}"
            )


def convert_row(row: Row, name: str, columns: Mapping[str, str]) -> list[Item]:
    """Convert `row` by the format `name` to one item, or to several for a tree.

    Raises RowError if the row does not have this format, or its subclasses MissingColumnError and
    EmptyAnswerError.
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
    """Return `values` with the mapped columns renamed to their fields.

    Raises MissingColumnError, which names the deepest existing part of a dotted path.
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
    """Return `values` without the aliases of fields that `columns` maps."""
    others = {
        name
        for names in form.required
        if not columns.keys().isdisjoint(names)
        for name in names
        if name not in columns
    }
    return {name: value for name, value in values.items() if name not in others}


def _missing(names: tuple[str, ...], columns: Mapping[str, Any]) -> MissingColumnError:
    hint = next((hint for name in names if (hint := typo_hint(name, columns))), "")
    return MissingColumnError(f"missing '{names[0]}'; found {listed(columns)}{hint}", columns)


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    known = list(dict.fromkeys(known))
    return nearest_hint(name, known, otherwise=f"; use one of {', '.join(known)}")


def _first_present(values: Mapping[str, Any], names: Iterable[str]) -> tuple[str, Any]:
    return next((name, values[name]) for name in names if name in values)


def _read_alpaca(values: Mapping[str, Any], origin: Origin) -> list[Item]:
    question, input_start = read_text(values["instruction"], "instruction"), 0
    if extra := read_optional_text(values, "input").strip():
        question, input_start = (
            (f"{question}\n\n{extra}", len(question) + 2) if question else (extra, 0)
        )
    name, answer = _first_present(values, _ALPACA_ANSWERS)
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
        raise RowError(f"history is {type_of(history)}, not a list of [question, answer]")
    turns = []
    for index, pair in enumerate(history):
        where = f"history[{index}]"
        if not isinstance(pair, list) or len(pair) != 2:
            raise RowError(f"{where} is {type_of(pair)}, not [question, answer]")
        turns.append(Turn("user", read_text(pair[0], f"{where}[0]")))
        turns.append(Turn("assistant", read_answer(pair[1], f"{where}[1]")))
    return turns


def _read_messages(values: Mapping[str, Any], origin: Origin) -> list[Item]:
    name, items = _first_present(values, _TURNS)
    turns = normalize_turns(read_turns(items, name), name, read_optional_text(values, "system"))
    return [Conversation(turns, origin, read_tools(values), row_weight(values))]


def _read_prompt_completion(values: Mapping[str, Any], origin: Origin) -> list[Item]:
    prompt = values["prompt"]
    name, answer = _first_present(values, _COMPLETIONS)
    if is_turns(prompt) or is_turns(answer):
        return [_read_prompt_turns(prompt, answer, name, values, origin)]
    question = Segment(read_text(prompt, "prompt"), 0.0)
    return [Document((question, Segment(read_answer(answer, name), row_weight(values))), origin)]


def _read_prompt_turns(
    prompt: Any, answer: Any, name: str, values: Mapping[str, Any], origin: Origin
) -> Conversation:
    """Return a conversation of prompt and completion; answers in the prompt are masked."""
    if not (is_turns(prompt) and is_turns(answer)):
        raise RowError(
            f"prompt is {type_of(prompt)} and {name} {type_of(answer)}; give turns in both"
        )
    prompt_turns = [
        Turn(turn.role, turn.content, 0.0, turn.reasoning, turn.tool_calls)
        if turn.role == "assistant"
        else turn
        for turn in read_turns(prompt, "prompt")
    ]
    turns = normalize_turns(prompt_turns + read_turns(answer, name), f"prompt + {name}")
    return Conversation(turns, origin, read_tools(values), row_weight(values))


def _read_completion(values: Mapping[str, Any], origin: Origin) -> list[Item]:
    name, value = _first_present(values, ("segments", "text", "content"))
    weight = row_weight(values)
    if name != "segments":
        return [Document((Segment(read_text(value, name), weight),), origin)]
    if not isinstance(value, list) or not value:
        raise RowError("segments is not a list of at least one {text, weight}")
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


def suggest_settings(values: Mapping[str, Any]) -> str:
    """Return settings for a row, as in `format: alpaca, columns: {instruction: question}`.

    Returns "" if no column looks like a question, an answer or a text.
    """
    for name, value in values.items():
        if is_turns(value):
            return f"format: messages, columns: {{messages: {name}}}"
    question = _find_text(values, _QUESTIONS)
    answer = _find_text(values, _ANSWERS, but=question) or _find_nested_text(values, _ANSWERS)
    if question and answer:
        extra = _find_text(values, _EXTRAS, but=question)
        if not extra and "." in answer:
            extra = _input_next_to(values, answer)
        columns = {"instruction": question, "input": extra, "output": answer}
        named = [f"{field}: {path}" for field, path in columns.items() if path not in ("", field)]
        return f"format: alpaca, columns: {{{', '.join(named)}}}"
    texts = [name for name, value in values.items() if isinstance(value, str)]
    text = _find_text(values, _TEXTS) or (texts[0] if len(texts) == 1 and not answer else "")
    return f"format: completion, columns: {{text: {text}}}" if text and not question else ""


def _find_text(values: Mapping[str, Any], names: Sequence[str], but: str = "") -> str:
    """Return the path of the text under the first of `names`, not in column `but`; "" without."""
    for known in names:
        for name in values:
            if name.lower() == known and name != but.split(".")[0]:
                path = _text_path(values[name], name, (*_ANSWERS, *_TEXTS))
                if path:
                    return path
    return ""


def _find_nested_text(values: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the path of a text under one of `names` inside a list or an object; "" without."""
    for name, value in values.items():
        if isinstance(value, (list, dict)) and (path := _text_path(value, name, names)):
            return path
    return ""


def _text_path(value: Any, path: str, names: Sequence[str], depth: int = 0) -> str:
    if isinstance(value, str):
        return path if depth or value.strip() else ""
    if depth == _MAX_DEPTH:
        return ""
    if isinstance(value, list):
        return _text_path(value[0], f"{path}.0", names, depth + 1) if value else ""
    if isinstance(value, dict):
        for name in names:
            if found := _text_path(value.get(name), f"{path}.{name}", names, depth + 1):
                return found
    return ""


def _input_next_to(values: Mapping[str, Any], answer: str) -> str:
    """Return the path of an `input` in the same object as a nested answer; "" without."""
    found: Any = values
    *steps, _ = answer.split(".")
    for step in steps:
        found = found[int(step)] if isinstance(found, list) else found[step]
    has_input = isinstance(found, dict) and isinstance(found.get("input"), str)
    return ".".join([*steps, "input"]) if has_input else ""


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
            (("instruction",), _ALPACA_ANSWERS),
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
    """Return ids and weights; the weights of `labels`, `loss_mask` and `weights` are multiplied.

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
    for name in ("loss_mask", "weights"):
        if values.get(name) is not None:
            factors = _numbers(values[name], name, len(ids))
            weights = [a * b for a, b in zip(weights, factors, strict=True)]
    return Tokens(tuple(ids[first:end]), tuple(weights[first:end]), origin)


def _find_padding(values: Mapping[str, Any], count: int) -> tuple[int, int]:
    """Return the end of the padding before the tokens, and the start of that after them."""
    if values.get("attention_mask") is None:
        return 0, count
    mask = _integers(values["attention_mask"], "attention_mask")
    _check_length(mask, "attention_mask", count)
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
    labels = _integers(value, "labels")
    _check_length(labels, "labels", len(ids))
    if labels == ids:
        return weights
    label_weights = [
        0.0 if label == IGNORED else weight if label == token else -1.0
        for label, token, weight in zip(labels, ids, weights, strict=True)
    ]
    if -1.0 in label_weights[first:end]:
        place = label_weights.index(-1.0, first)
        raise RowError(
            f"labels[{place}] is {labels[place]} and input_ids[{place}] is {ids[place]}; labels "
            f"must equal input_ids (they are not shifted) or be {IGNORED}"
        )
    return label_weights


def _integers(value: Any, name: str) -> list[int]:
    if not isinstance(value, list):
        raise RowError(f"{name} is {type_of(value)}, not a list of numbers")
    if not set(map(type, value)) <= {int}:
        place = next(i for i, number in enumerate(value) if type(number) is not int)
        raise RowError(f"{name}[{place}] is {type_of(value[place])}, not a whole number")
    return value


def _numbers(value: Any, name: str, count: int) -> list[float]:
    if not isinstance(value, list):
        raise RowError(f"{name} is {type_of(value)}, not a list of numbers")
    _check_length(value, name, count)
    return [read_weight(number, name) for number in value]


def _check_length(value: list[Any], name: str, count: int) -> None:
    if len(value) != count:
        raise RowError(
            f"{name} has {len(value):,} numbers and input_ids {count:,}; give one per token"
        )
