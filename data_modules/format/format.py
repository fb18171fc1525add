"""Convert a row of a named format to conversations, documents or tokens.

Decides which columns a format reads and which format a row has. Never tokenizes and never reads
files.

Rules for conversations: roles have their usual names (`human`, `gpt`, ...); consecutive turns of
one role are joined (see turns.py); a system turn comes first; a user turn comes before the first
answer; a tool result follows its call. `columns` in the settings maps a field of the format to a
column, or to a dotted path into one.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.errors import DataError, Origin
from common.text import listed
from data_modules.format import fields, meaning
from data_modules.format.fields import MissingColumnError, RowColumns, RowError, parse_text, type_of
from data_modules.format.meaning import KTO, PREFERENCE, MeaningError
from data_modules.format.turns import (
    MEDIA,
    TOOL_COLUMNS,
    check_no_media,
    normalize_turns,
    read_tools,
    read_tree,
    read_turns,
)
from data_modules.types import Conversation, Document, Item, Row, Segment, Turn

_ALPACA_QUESTIONS = ("instruction", "question", "query", "problem")
_ALPACA_ANSWERS = ("output", "response", "completion", "solution", "answer")
_COMPLETIONS = ("completion", "response", "output", "answer")
_SHAREGPT = ("conversations", "conversation")
_TEXT_COLUMNS = ("text", "content", "segments")
_TURN_FORMATS = ("messages", "sharegpt", "prompt_completion")
_SLIP = 0.9
"""similarity of two names that differ by one letter"""
_FLAT_TREE = {"parent_id", "role", "text"}


@dataclass(frozen=True, slots=True)
class Format:
    """A row format: its fields with their aliases, and the function that reads a row.

    `guessed_by` are columns of this format only: it is not guessed without them.
    """

    name: str
    required: tuple[tuple[str, ...], ...]
    optional: tuple[str, ...]
    read: Callable[[RowColumns, Origin], list[Item]]
    guessed_by: tuple[str, ...] = ()
    is_guessed: bool = True
    """whether rows may be found to be of it; not where only an objective says how they are meant"""
    unless_mapped: tuple[str, ...] = ()
    """optional fields that are read only if no `columns` say what a row's columns are"""

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
    return next(
        (name for name, form in FORMATS.items() if form.is_guessed and form.fits(present)), None
    )


def guess_format(rows: Sequence[Row], columns: Mapping[str, str]) -> str:
    """Return the format of most rows; raise DataError if the first row and most rows have none."""
    votes: Counter[str] = Counter()
    unknown: dict[int, str] = {}
    for number, row in enumerate(rows):
        try:
            values = _apply_columns(row.values, columns)
        except MissingColumnError as error:
            unknown[number] = f"{row.origin} {error}"
            continue
        name = format_of(values)
        try:
            meaning.check_meaning(row.values, values, columns, name)
        except MeaningError as error:
            raise DataError(f"{row.origin} {error}") from error
        if name is None:
            suggestion = meaning.suggest_settings(row.values)
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


def check_guessed(row: Row, columns: Mapping[str, str]) -> None:
    """Raise MeaningError if a row, in data whose format was guessed, means more than its text."""
    if meaning.may_mean_more(tuple(row.values)):
        values = _apply_columns(row.values, columns)
        meaning.check_meaning(row.values, values, columns, format_of(values))


def _near_field(columns: Iterable[str]) -> str:
    """Return a hint if a column differs from a required field of a format by one letter."""
    found = [name for name in columns if name != "answers"]  # not a slip: a name of its own
    required = (names for form in FORMATS.values() for names in form.required)
    names = [name for aliases in required if not set(aliases) & set(found) for name in aliases]
    return next((hint for name in names if (hint := fields.typo_hint(name, found, _SLIP))), "")


def check_format(name: str) -> None:
    """Raise ValueError, with the nearest name, if there is no format `name`."""
    if name not in FORMATS:
        raise ValueError(f"format: unknown format '{name}'{_did_you_mean(name, FORMATS)}")


def check_columns(name: str, columns: Mapping[str, str]) -> None:
    """Raise ValueError if `columns` maps a field that the format `name` does not have."""
    known = FORMATS[name].fields()
    for field in columns:
        if field not in known:
            raise ValueError(
                f"columns.{field}: format '{name}' has no field '{field}'"
                f"{_did_you_mean(field, known)}"
            )


def convert_row(
    row: Row, name: str, columns: Mapping[str, str], unread: set[str] | None = None
) -> list[Item]:
    """Convert `row` by the format `name` to one item, or to several for a tree.

    `unread` gets the names of columns and inner keys that hold a value and that nothing reads.
    Raises RowError if the row does not have this format, or its subclasses MissingColumnError and
    EmptyAnswerError.
    """
    form = FORMATS[name]
    values = row.values
    if columns:
        values = _without_aliases(_apply_columns(values, columns), form, columns)
    for names in form.required:
        if values.keys().isdisjoint(names):
            raise _missing(names, row.values, form)
    tracked, token = RowColumns(values), fields.UNREAD.set(unread)
    try:
        items = form.read(tracked, row.origin)
    except RowError as error:
        raise (_table_error(form, values) or error) from error
    finally:
        fields.UNREAD.reset(token)
    if form.name != "pretokenized" and not _OF_OTHER_ROWS.isdisjoint(values):
        _check_text_row(form, values, items[0])
    if _KWARGS in values:
        kwargs = fields.read_template_kwargs(values[_KWARGS], _KWARGS) or None
        for number, item in enumerate(items):
            if isinstance(item, Conversation):
                tracked.read.add(_KWARGS)
                items[number] = replace(item, template_kwargs=kwargs)
    if unread is not None:
        unread |= {name for name in values.keys() - tracked.read if fields.is_filled(values[name])}
        # Those that `columns` hides, but not those that it names.
        hidden = row.values.keys() - (values.keys() - columns.keys())
        unread |= {name for name in hidden if fields.is_filled(row.values[name])}
        unread -= {*columns.values(), *(path.split(".", 1)[0] for path in columns.values())}
    return items


def _table_error(form: Format, values: Mapping[str, Any]) -> RowError | None:
    """Return the error of a row whose columns are those of a whole table; None of other rows."""
    lengths = {len(value) if isinstance(value, list) else 0 for value in values.values()}
    if form.name == "pretokenized" or len(values) < 2 or len(lengths) > 1 or max(lengths) < 2:
        return None
    _, column = _first_present(values, form.required[0])
    if not isinstance(column[0], (str, list)):
        return None
    return RowError(
        f"{', '.join(values)} are lists of {max(lengths):,} values each: the columns of a table, "
        "not a row; write a row for each of the values"
    )


def _check_text_row(form: Format, values: Mapping[str, Any], item: Item) -> None:
    """Raise RowError if a row of text has a mask of tokens, or images that belong to its text."""
    # Whether turns of the row's own stand in its columns.
    name = _answered_by(values) if form.name == KTO else form.name
    has_turns = name in _TURN_FORMATS and isinstance(item, Conversation)
    fields.check_no_token_mask(values, has_turns=has_turns)
    if isinstance(item, Conversation):
        check_no_media(values, text="\n".join(turn.content for turn in item.turns))
    elif isinstance(item, Document):
        # A corpus may keep the picture of each text; a prompt that comes with one is about it.
        check_no_media(values, text=item.text, needs_mark=form.name == "completion")


def _answered_by(columns: Iterable[str]) -> str | None:
    """Return the format of the prompt and the answer beside a verdict."""
    rest = [column for column in columns if column not in meaning.VERDICTS]
    return next((name for name in _ANSWERED if FORMATS[name].fits(rest)), None)


def _apply_columns(values: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Return `values` with the mapped columns renamed to their fields.

    Raises MissingColumnError, which names the deepest existing part of a dotted path.
    """
    if not columns:
        return values
    mapped = {
        field: fields.read_path(values, path, f"data.datasets[].columns.{field}")
        for field, path in columns.items()
    }
    taken = set(columns.values())
    return {name: value for name, value in values.items() if name not in taken} | mapped


def _without_aliases(
    values: dict[str, Any], form: Format, columns: Mapping[str, str]
) -> dict[str, Any]:
    """Return `values` without the aliases of fields that `columns` maps."""
    others = {name for name in form.unless_mapped if name not in columns} | {
        name
        for names in form.required
        if not columns.keys().isdisjoint(names)
        for name in names
        if name not in columns
    }
    return {name: value for name, value in values.items() if name not in others}


def _missing(
    names: tuple[str, ...], columns: Mapping[str, Any], form: Format
) -> MissingColumnError:
    others = [name for name in columns if name not in form.fields()]  # fields are no misspellings
    hint = next((hint for name in names if (hint := fields.typo_hint(name, others))), "")
    if names[0] in meaning.ANSWERS:
        hint = hint or meaning.suggest_pair(columns)
    hint = hint or _HINTS.get(names, "")
    return MissingColumnError(f"missing '{names[0]}'; found {listed(columns)}{hint}", columns)


_NAME_IT = "name its column in data.datasets[].columns, or for rows without one type objective=sft"
_HINTS: dict[tuple[str, ...], str] = {
    meaning.CLASS_COLUMNS: f"; rows of objective=classify have a text and a label: {_NAME_IT}",
    meaning.VERDICTS: f"; rows of objective=kto have a prompt, an answer and a label: {_NAME_IT}",
} | dict.fromkeys(
    ((answer,) for answer in meaning.ANSWERS),
    "; rows of preference pairs have a prompt, chosen and rejected: name their columns in "
    "data.datasets[].columns, or for rows with one answer type objective=sft",
)
"""fields of a format -> what is said of rows without them"""


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    known = list(dict.fromkeys(known))
    return fields.nearest_hint(name, known, otherwise=f"; use one of {', '.join(known)}")


def _first_present(values: Mapping[str, Any], names: Iterable[str]) -> tuple[str, Any]:
    return next((name, values[name]) for name in names if name in values)


def _read_alpaca(values: RowColumns, origin: Origin) -> list[Item]:
    name, question = _first_present(values, _ALPACA_QUESTIONS)
    question, input_start = parse_text(question, name), 0
    extras = (fields.read_optional_text(values, field).strip() for field in ("input", "context"))
    if extra := "\n\n".join(filter(None, extras)):
        question, input_start = (
            (f"{question}\n\n{extra}", len(question) + 2) if question else (extra, 0)
        )
    name, answer = _first_present(values, _ALPACA_ANSWERS)
    turns = [
        Turn("user", question, input_start=input_start),
        Turn("assistant", fields.read_answer(answer, name)),
    ]
    if values.get("history"):
        turns = _read_history(values["history"]) + turns
    systems = (fields.read_optional_text(values, field) for field in ("system", "system_prompt"))
    if system := next(filter(None, systems), ""):
        turns.insert(0, Turn("system", system))
    return [Conversation(tuple(turns), origin, weight=fields.row_weight(values))]


def _read_history(history: Any) -> list[Turn]:
    if not isinstance(history, list):
        raise RowError(f"history is {type_of(history)}, not a list of [question, answer]")
    turns = []
    for index, pair in enumerate(history):
        where = f"history[{index}]"
        if not isinstance(pair, list) or len(pair) != 2:
            raise RowError(f"{where} is {type_of(pair)}, not [question, answer]")
        turns.append(Turn("user", parse_text(pair[0], f"{where}[0]")))
        turns.append(Turn("assistant", fields.read_answer(pair[1], f"{where}[1]")))
    return turns


def _read_conversation(
    values: RowColumns, origin: Origin, names: Sequence[str] = _SHAREGPT
) -> list[Item]:
    name, items = _first_present(values, names)
    turns = fields.apply_turn_masks(read_turns(items, name), values, name)
    joined = normalize_turns(turns, name, fields.read_optional_text(values, "system"))
    return [Conversation(joined, origin, read_tools(values), fields.row_weight(values))]


def _read_prompt_completion(values: RowColumns, origin: Origin) -> list[Item]:
    prompt = values["prompt"]
    name, answer = _first_present(values, _COMPLETIONS)
    if fields.is_turns(prompt) or fields.is_turns(answer):
        return [_read_prompt_turns(prompt, answer, name, values, origin)]
    question, weight = Segment(parse_text(prompt, "prompt"), 0.0), fields.row_weight(values)
    answered = Segment(fields.read_answer(answer, name), weight)
    return [Document((question, answered), origin, weight=weight)]


def _read_prompt_turns(
    prompt: Any, answer: Any, name: str, values: RowColumns, origin: Origin
) -> Conversation:
    """Return a conversation of prompt and completion; answers in the prompt are masked."""
    if isinstance(answer, dict) and fields.is_turns([answer]):
        answer = [answer]
    if not (fields.is_turns(prompt) and fields.is_turns(answer)):
        raise RowError(
            f"prompt is {type_of(prompt)} and {name} {type_of(answer)}; give turns in both"
        )
    prompt_turns = [
        Turn(turn.role, turn.content, 0.0, turn.reasoning, turn.tool_calls)
        if turn.role == "assistant"
        else turn
        for turn in read_turns(prompt, "prompt")
    ]
    both = f"prompt + {name}"
    weighed = fields.apply_turn_masks(prompt_turns + read_turns(answer, name), values, both)
    turns = normalize_turns(weighed, both)
    return Conversation(turns, origin, read_tools(values), fields.row_weight(values))


def _read_completion(values: RowColumns, origin: Origin) -> list[Item]:
    name, value = _first_present(values, ("segments", *_TEXT_COLUMNS))
    weight = fields.row_weight(values)
    if name != "segments":
        return [Document((Segment(parse_text(value, name), weight),), origin, weight=weight)]
    if not isinstance(value, list) or not value:
        raise RowError("segments is not a list of at least one {text, weight}")
    segments = tuple(_read_segment(item, i, weight) for i, item in enumerate(value))
    return [Document(segments, origin, weight=weight)]


def _read_segment(item: Any, index: int, weight_of_row: float) -> Segment:
    where = f"segments[{index}]"
    if not isinstance(item, dict) or "text" not in item:
        raise RowError(f"{where} is not {{text, weight}}")
    fields.read_weight(item.get("weight", 1.0), f"{where}.weight")
    fields.check_no_details(item, where, "a segment, which has a weight")
    weight = fields.turn_weight(item, where)
    weight = weight_of_row if weight is None else weight * weight_of_row
    label = ("label",) if isinstance(item.get("label"), bool) else ()
    if label:
        weight *= item["label"]
    fields.note_unread(item, ("text", *label, *fields.MASK_KEYS), where)
    return Segment(parse_text(item["text"], f"{where}.text"), weight)


def _read_oasst(values: RowColumns, origin: Origin) -> list[Item]:
    return [*read_tree(values["prompt"], origin, fields.row_weight(values))]


def _read_kto(values: RowColumns, origin: Origin) -> list[Item]:
    verdict = meaning.read_verdict(values)
    row = RowColumns(
        {name: value for name, value in values.items() if name not in meaning.VERDICTS}
    )
    name = _answered_by(row)
    if name is None:
        raise RowError(
            f"columns {listed(row)}: no prompt with an answer beside the verdict; name their "
            "columns in data.datasets[].columns, as in {prompt: question, completion: answer}"
        )
    (item,) = FORMATS[name].read(row, origin)
    values.read.update(row.read)
    return [meaning.with_verdict(item, verdict, only_last=name != "prompt_completion")]


def _read_classification(values: RowColumns, origin: Origin) -> list[Item]:
    label, weight = meaning.read_class(values), fields.row_weight(values)
    name = next((each for each in _CLASSIFIED if each in values), None)
    if name is None:
        raise RowError(
            f"columns {listed(values)}: no text beside the label; name its column in "
            "data.datasets[].columns, as in {text: review}"
        )
    if not fields.is_turns(values[name]):
        return [Document((Segment(parse_text(values[name], name), weight),), origin, label)]
    turns = normalize_turns(read_turns(values[name], name), name)
    if any(turn.weight is not None for turn in turns):
        raise RowError(
            f"{name} has turns with a weight, but the class is that of the whole text; give the "
            "row a column 'weight', or leave it out"
        )
    read = tuple(replace(turn, weight=1.0) for turn in turns)
    return [Conversation(read, origin, read_tools(values), weight, label=label)]


_CLASSIFIED = ("text", "messages", "conversations", "content", "sentence", "prompt")
"""columns of a text with a class, in the order in which they are looked for"""
_ANSWERED = ("messages", "sharegpt", "alpaca", "prompt_completion")
"""formats of rows with an answer to a prompt"""
_OF_OTHER_ROWS = frozenset((*fields.TOKEN_MASKS, *fields.TURN_MASKS, *MEDIA))
_KWARGS = "chat_template_kwargs"
FORMATS: dict[str, Format] = {
    form.name: form
    for form in (
        Format(
            "messages",
            (("messages",),),
            ("system", *TOOL_COLUMNS, _KWARGS),
            functools.partial(_read_conversation, names=("messages",)),
        ),
        Format("sharegpt", (_SHAREGPT,), ("system", *TOOL_COLUMNS, _KWARGS), _read_conversation),
        Format(
            "alpaca",
            (_ALPACA_QUESTIONS, _ALPACA_ANSWERS),
            ("input", "context", "system", "system_prompt", "history", _KWARGS),
            _read_alpaca,
            unless_mapped=("context", "system_prompt"),
        ),
        Format(
            "pretokenized",
            (("input_ids",), fields.MASKS),
            ("attention_mask", *fields.PACKED, *fields.DOCUMENT_IDS),
            fields.read_tokens,
        ),
        Format(
            "prompt_completion",
            (("prompt",), _COMPLETIONS),
            (*TOOL_COLUMNS, _KWARGS),
            _read_prompt_completion,
        ),
        Format("oasst", (("prompt",),), (_KWARGS,), _read_oasst, guessed_by=("message_tree_id",)),
        Format("completion", (_TEXT_COLUMNS,), (), _read_completion),
        Format(
            PREFERENCE,
            tuple((answer,) for answer in meaning.ANSWERS),
            (*meaning.PROMPTS, "input", "system", "margin", *TOOL_COLUMNS, _KWARGS),
            meaning.read_pair,
            is_guessed=False,
        ),
    )
}
FORMATS |= {
    form.name: form
    for form in (
        Format(
            KTO,
            (meaning.VERDICTS,),
            tuple(
                dict.fromkeys(
                    field
                    for name in _ANSWERED
                    for field in FORMATS[name].fields()
                    if field not in (*meaning.VERDICTS, "weight")
                )
            ),
            _read_kto,
            is_guessed=False,
        ),
        Format(
            meaning.CLASSIFICATION,
            (meaning.CLASS_COLUMNS,),
            (*_CLASSIFIED, *TOOL_COLUMNS, _KWARGS),
            _read_classification,
            is_guessed=False,
        ),
    )
}
