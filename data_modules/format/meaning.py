"""What a row means beyond its text: pairs of answers, verdicts and classes.

Decides what the answer of a row with a label is, what the prompt of a pair is, and which other
row's answer stands for any answer to its prompt, by which the drift from the base is measured.
Rows whose format is guessed are refused if they mean more, with settings to type.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from common.errors import Origin
from common.text import listed
from data_modules.format import fields
from data_modules.format.fields import RowColumns, RowError, is_turns, parse_text, quote
from data_modules.format.turns import (
    CONTENT_FIELDS,
    MEDIA,
    ROLES,
    TOOL_COLUMNS,
    normalize_turns,
    read_tools,
    read_turns,
)
from data_modules.types import Conversation, Document, Item, Segment, Turn

_OF_PAIRS = re.compile(r"(chosen|rejected)(_|$)")
"""names of the columns of preference pairs"""
_REJECTED = re.compile(r"rejected(_|$)")
VERDICTS = ("label", "kto_tag")
"""columns that say whether an answer is wanted"""
_TELLING = {
    *(
        *fields.MASK_KEYS,
        *fields.MASKS,
        *fields.PACKED,
        *fields.DOCUMENT_IDS,
        *TOOL_COLUMNS,
        *MEDIA,
        *VERDICTS,
        *CONTENT_FIELDS,
    ),
    *("system", "input", "history", "parameters", "chat_template_kwargs", "input_ids"),
    *("mask", "masked", "trainable"),
}
"""names that mean something where they are read: the first to be named if they are not"""
_QUESTIONS = ("instruction", "question", "query", "problem", "prompt", "input", "user", "human")
_ANSWERS = (
    *("output", "answer", "response", "completion", "solution", "answers", "target", "reply"),
    *("assistant", "gpt", "summary"),
)
_EXTRAS = ("input", "context", "passage")
_TEXTS = ("text", "content", "body", "document", "article", "code", "markdown")
_UNQUOTED = re.compile(
    r"(?!(true|false|null|yes|no|on|off|nan|inf)$)[a-z_][\w./-]*( [\w./-]+)*", re.ASCII | re.I
)
"""a name that is read as it is without quotes, in a list on the command line and in YAML"""
_MAX_DEPTH = 3
"""nesting below a column to which texts are searched for suggestions"""
_TURNS = ("messages", "conversations", "conversation")
"""columns of turns"""
_CLASSES = ("label", "labels")
_CHOICES = ("choices", "options", "endings")
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


def sort_unread(counts: Mapping[str, tuple[int, str]]) -> list[tuple[str, int, str]]:
    """Return (name, rows, first origin) of what nothing reads, what may matter first."""

    def rank(name: str) -> bool:
        last = name.rpartition(".")[2]
        return last not in _TELLING and not _OF_PAIRS.match(last)

    ordered = sorted(counts.items(), key=lambda found: (rank(found[0]), -found[1][0], found[0]))
    return [(name, rows, origin) for name, (rows, origin) in ordered]


class MeaningError(RowError):
    """A row means more than its text: a pair of answers, a verdict, a class or a choice."""


@functools.lru_cache(maxsize=1024)
def may_mean_more(columns: tuple[str, ...]) -> bool:
    """Return whether a row of these columns may be one that `check_meaning` refuses."""
    return any(map(_REJECTED.match, columns)) or not {*VERDICTS, *_CLASSES, *_CHOICES}.isdisjoint(
        columns
    )


def check_meaning(
    row: Mapping[str, Any], values: Mapping[str, Any], columns: Mapping[str, str], name: str | None
) -> None:
    """Raise MeaningError if a row of the guessed format `name` is not meant to be learned as it is.

    It may be a pair of answers of which one is wrong, an answer with a verdict, a text with its
    class, or a question whose answer is the number or letter of a choice. `row` is as in its file,
    `values` the same after `columns` of the settings is applied. A given format says that the rows
    are meant so.
    """
    found = f"columns {listed(row)}"
    is_pair = any(
        isinstance(value, (str, list, dict)) and fields.is_filled(value)
        for key, value in values.items()
        if _REJECTED.match(key)
    )
    if is_pair and not any(map(_OF_PAIRS.match, columns.values())):
        settings = _settings_for_chosen(values, name)
        fix = f"set {{path: ..., {settings}}}" if settings else "write each as the last turn"
        raise MeaningError(
            f"{found}: preference pairs; to learn from both answers, type objective=dpo; to train "
            f"on the chosen ones, {fix}"
        )
    choices = next((key for key in _CHOICES if isinstance(values.get(key), (list, dict))), None)
    answer = values.get("answer")
    is_text = isinstance(answer, str) and len(answer.strip()) > 1
    if choices and not columns and not is_text and name in (None, "alpaca", "prompt_completion"):
        raise MeaningError(
            f"{found}: questions with '{choices}', of which a number or letter says the right one; "
            "write the question with its choices in a column 'instruction' and the right one in "
            "'output'; to measure such answers, evaluation=mmlu or arc"
        )
    if name is None:
        return
    verdict = next((key for key in VERDICTS if fields.is_flag(values.get(key))), None)
    if verdict and name not in ("completion", "pretokenized"):
        raise MeaningError(
            f"{found}: answers that are wanted or not; to learn from both, type objective=kto; to "
            f"train on those whose '{verdict}' is true, set {{path: ..., columns: {{weight: "
            f"{verdict}}}}}; to train on all of them, format: {name}"
        )
    labels = (key for key in _CLASSES if values.get(key) not in (None, ""))
    label = next((key for key in labels if isinstance(values[key], (str, int, float))), None)
    text = next((key for key in ("text", "content") if key in values), None)
    if label and text and name == "completion":
        raise MeaningError(
            f"{found}: texts with their class (classification); to train a head that tells the "
            f"classes apart, type objective=classify; to train the model to answer '{text}' with "
            f"'{label}', set {{path: ..., format: alpaca, columns: {{instruction: {text}, output: "
            f"{label}}}}} (classes as words); to train on '{text}' alone, format: completion"
        )


def _settings_for_chosen(values: Mapping[str, Any], name: str | None) -> str:
    """Return the settings that train on the chosen answers of preference pairs.

    `name` is the format that the other columns have; "" if the answers must be rewritten first.
    """
    chosen = next((key for key in values if key.startswith("chosen")), "")
    answer = values.get(chosen)
    turns = next((key for key in (*_TURNS, "prompt") if is_turns(values.get(key))), "")
    if name is not None and not (turns and _role_of(values[turns][-1]) != "assistant"):
        return f"format: {name}"
    first = answer[0] if isinstance(answer, list) and answer else answer
    if isinstance(first, dict):
        if _role_of(first) != "assistant":
            return f"format: messages, columns: {{messages: {chosen}}}"
        columns = {"prompt": turns, "completion": chosen} if turns else {}
        return _named("prompt_completion", columns)
    question = _find_text(values, _QUESTIONS, but=chosen)
    if turns or not isinstance(answer, str):
        return ""
    if not question:
        return _named("completion", {"text": chosen})
    if question == "prompt":
        return _named("prompt_completion", {"completion": chosen})
    return _named("alpaca", {"instruction": question, "output": chosen})


def _named(name: str, columns: Mapping[str, str]) -> str:
    """Return the settings for a format whose fields are in these columns."""
    named = [
        f"{field}: {_typed(path)}" for field, path in columns.items() if path not in ("", field)
    ]
    return f"format: {name}, columns: {{{', '.join(named)}}}" if named else ""


def _typed(path: str) -> str:
    """Return a column as it is typed, in quotes if settings would read it otherwise."""
    return path if _UNQUOTED.fullmatch(path) else json.dumps(path, ensure_ascii=False)


def _role_of(turn: Any) -> str:
    name = turn.get("role") or turn.get("from") if isinstance(turn, dict) else None
    return ROLES.get(name, "") if isinstance(name, str) else ""


def suggest_settings(values: Mapping[str, Any]) -> str:
    """Return settings for a row, as in `format: alpaca, columns: {instruction: question}`.

    Returns "" if no column looks like a question, an answer or a text.
    """
    for name, value in values.items():
        if is_turns(value):
            return f"format: messages, columns: {{messages: {_typed(name)}}}"
    question = _find_text(values, _QUESTIONS)
    inner = ((name, value) for name, value in values.items() if isinstance(value, (list, dict)))
    nested = (path for name, value in inner if (path := _text_path(value, name, _ANSWERS)))
    answer = _find_text(values, _ANSWERS, but=question) or next(nested, "")
    if question and answer:
        extra = _find_text(values, _EXTRAS, but=question)
        if not extra and "." in answer:
            extra = _input_next_to(values, answer)
        columns = {"instruction": question, "input": extra, "output": answer}
        return _named("alpaca", columns)
    texts = [name for name, value in values.items() if isinstance(value, str) and value.strip()]
    text = _find_text(values, _TEXTS) or (texts[0] if len(texts) == 1 and not answer else "")
    if not text or question:
        return ""
    return f"format: completion, columns: {{text: {_typed(text)}}}"


def suggest_pair(values: Mapping[str, Any]) -> str:
    """Return how to make pairs of a row with a list of answers, such as ranked ones; "" without."""
    for name, value in values.items():
        if isinstance(value, list) and len(value) > 1 and not is_turns(value):
            path = _text_path(value, name, (*_ANSWERS, *_TEXTS))
            worst = f"{name}.{len(value) - 1}{path.removeprefix(f'{name}.0')}"
            return path and (
                f"; '{name}' is a list of {len(value)} answers: write a row for each pair of them, "
                f"or if the best is first, columns: {{chosen: {path}, rejected: {worst}}}"
            )
    return ""


def _find_text(values: Mapping[str, Any], names: Sequence[str], but: str = "") -> str:
    """Return the path of the text under the first of `names`, not in column `but`; "" without."""
    for known in names:
        for name in values:
            if name.lower() == known and name != but.split(".")[0]:
                path = _text_path(values[name], name, (*_ANSWERS, *_TEXTS))
                if path:
                    return path
    return ""


def _text_path(value: Any, path: str, names: Sequence[str], depth: int = 0) -> str:
    if isinstance(value, str):
        return path if value.strip() else ""
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


def read_pair(values: RowColumns, origin: Origin) -> list[Item]:
    """Return the conversations or documents of the chosen and of the rejected answer."""
    name = next((name for name in PROMPTS if values.get(name) is not None), None)
    prompt = None if name is None else values[name]
    answers = {answer: values[answer] for answer in ANSWERS}
    if name == "prompt" and all(isinstance(text, str) for text in (prompt, *answers.values())):
        return [
            Document(
                (
                    Segment(parse_text(prompt, "prompt"), 0.0),
                    Segment(fields.read_answer(text, answer), fields.row_weight(values)),
                ),
                origin,
                _read_margin(values),
            )
            for answer, text in answers.items()
        ]
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
    weight, tools, margin = fields.row_weight(values), read_tools(values), _read_margin(values)
    system = fields.read_optional_text(values, "system")
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
    return [Turn("assistant", fields.read_answer(value, name))]


def _prompt_turns(values: Mapping[str, Any], name: str | None) -> list[Turn]:
    """Return the turns in the prompt's column, none without one."""
    if name is None:
        return []
    if is_turns(values[name]) and name not in _OF_TEXT:
        return read_turns(values[name], name)
    text = parse_text(values[name], name)
    if name == "instruction" and (extra := fields.read_optional_text(values, "input").strip()):
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
