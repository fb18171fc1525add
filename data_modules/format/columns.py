"""Judge the columns of a row: what nothing reads, what means more than a text, and what to suggest.

Columns, keys of turns, of their parts and calls that nothing reads are counted for the reports.
Never converts a row.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from common.text import listed
from data_modules.format.fields import (
    DOCUMENT_IDS,
    FLAGS,
    MASK_KEYS,
    MASKS,
    PACKED,
    RowError,
    is_flag,
    is_turns,
)
from data_modules.format.turns import (
    CALL_ROLES,
    CONTENT_FIELDS,
    MEDIA,
    REASONING_FIELDS,
    ROLES,
    TOOLS,
    arguments_key,
)

PREFERENCE = re.compile(r"(chosen|rejected)(_|$)")
"""names of the columns of preference pairs"""
_REJECTED = re.compile(r"rejected(_|$)")
VERDICTS = ("label", "kto_tag")
"""columns that say whether an answer is wanted"""
_WHOLE = frozenset((*TOOLS, "chat_template_kwargs"))
"""columns that are handed to the template as they are"""
_TELLING = frozenset(
    (
        *MASK_KEYS,
        *MASKS,
        *PACKED,
        *DOCUMENT_IDS,
        *TOOLS,
        *MEDIA,
        *VERDICTS,
        *CONTENT_FIELDS,
        *("system", "input", "history", "parameters", "chat_template_kwargs", "input_ids"),
        *("mask", "masked", "trainable"),
    )
)
"""names that mean something where they are read: the first to be named if they are not"""
_QUESTIONS = ("instruction", "question", "query", "problem", "prompt", "input", "user", "human")
_ANSWERS = (
    *("output", "answer", "response", "completion", "solution", "answers", "target", "reply"),
    *("assistant", "gpt", "summary"),
)
_EXTRAS = ("input", "context", "passage")
_TEXTS = ("text", "content", "body", "document", "article", "code", "markdown")
_MAX_DEPTH = 3
"""nesting below a column to which texts are searched for suggestions"""
_TURNS = ("messages", "conversations", "conversation")
"""columns of turns"""
_CLASSES = ("label", "labels")
_CHOICES = ("choices", "options", "endings")


def sort_unread(counts: Mapping[str, tuple[int, str]]) -> list[tuple[str, int, str]]:
    """Return (name, rows, first origin) of what nothing reads, what may matter first."""

    def rank(name: str) -> bool:
        last = name.rpartition(".")[2]
        return last not in _TELLING and not PREFERENCE.match(last)

    ordered = sorted(counts.items(), key=lambda found: (rank(found[0]), -found[1][0], found[0]))
    return [(name, rows, origin) for name, (rows, origin) in ordered]


def is_filled(value: Any) -> bool:
    """Return whether a value is more than null or empty."""
    return value is not None and value != "" and value != [] and value != {}


def find_unread(
    row: Mapping[str, Any],
    values: Mapping[str, Any],
    columns: Mapping[str, str],
    others: frozenset[str],
    *,
    has_turns: bool,
) -> set[str]:
    """Return the names of a row's columns and inner keys that nothing reads and that hold a value.

    `row` is as in its file, `values` the same after `columns` is applied; `others` are the columns
    of `values` that the format does not read. Of those FLAGS are read nevertheless if they hold a
    truth value, or one for each turn.
    """
    unread = {name for name in others if is_filled(values[name])}
    if columns:
        hidden = {name for name in row if name in columns or name not in values}
        unread |= {name for name in hidden if is_filled(row[name])}
        unread -= {*columns.values(), *(path.split(".", 1)[0] for path in columns.values())}
    for name in unread.intersection(FLAGS) if unread else ():
        if is_flag(values.get(name)) or (has_turns and isinstance(values.get(name), list)):
            unread.discard(name)
    for name in values.keys() - others:
        if isinstance(values[name], (list, dict)):
            unread.update(_unread_below(values[name], name))
    return unread


def _unread_below(value: Any, name: str) -> Iterator[str]:
    """Yield the names of keys below a column that nothing reads."""
    if name in _WHOLE:
        return
    if name == "segments" and isinstance(value, list):
        for segment in value:
            flags = [key for key in ("label",) if isinstance(segment.get(key), bool)]
            yield from _others(segment, ("text", *MASK_KEYS, *flags), "segments[]")
    elif isinstance(value, dict) and "replies" in value:
        yield from _unread_in_tree(value)
    elif isinstance(value, dict) and is_turns([value]):
        yield from _unread_in_turn(value, name)
    elif is_turns(value):
        for turn in value:
            if not _is_plain(turn):
                yield from _unread_in_turn(turn, f"{name}[]")
    elif isinstance(value, list):
        yield from _unread_in_parts(value, f"{name}[]")


def _is_plain(turn: Mapping[str, Any]) -> bool:
    """Return whether a turn is a role and a text: most are, and nothing of them is unread."""
    if len(turn) != 2:
        return False
    if "role" in turn and "content" in turn:
        role, content = turn["role"], turn["content"]
    elif "from" in turn and "value" in turn:
        role, content = turn["from"], turn["value"]
    else:
        return False
    return isinstance(content, str) and role not in CALL_ROLES


def _others(item: Mapping[str, Any], read: Iterable[str], where: str) -> Iterator[str]:
    for key in item.keys() - set(read):
        if is_filled(item[key]):
            yield f"{where}.{key}"


def _unread_in_tree(tree: Mapping[str, Any]) -> Iterator[str]:
    read = {"role", "text", "replies", "deleted", *MASK_KEYS}
    todo = [tree]
    while todo:
        message = todo.pop()
        is_reviewed = isinstance(message.get("review_result"), bool)
        yield from _others(message, read | {"review_result"} if is_reviewed else read, "message")
        replies = message.get("replies")
        # Below a message that is left out nothing was checked.
        todo += [reply for reply in replies or () if isinstance(reply, dict)]


def _unread_in_turn(turn: Mapping[str, Any], where: str) -> Iterator[str]:
    role = "role" if turn.get("role") is not None else "from"
    content = next((field for field in CONTENT_FIELDS if field in turn), "")
    reasoning = next((field for field in REASONING_FIELDS if turn.get(field)), "")
    calls = next((key for key in ("tool_calls", "function_call") if turn.get(key)), "")
    read = {role, content, reasoning, calls, *MASK_KEYS}
    if ROLES[turn[role]] == "tool":
        read |= {"name", "tool_call_id"}
    yield from _others(turn, read, where)
    if calls:
        yield from _unread_in_calls(turn[calls], f"{where}.{calls}")
    elif turn[role] in CALL_ROLES:
        yield from _unread_in_calls(turn[content], f"{where}.{content}")
    if isinstance(turn.get(content), list):
        yield from _unread_in_parts(turn[content], f"{where}.{content}[]")


def _unread_in_parts(parts: Iterable[Any], where: str) -> Iterator[str]:
    for part in parts:
        if not isinstance(part, dict):
            continue
        name = part.get("type") or "text"
        keys = ("tool_call", "text", "value") if name == "tool_call" else ("text", "value", name)
        used = next((key for key in keys if part.get(key) is not None), "")
        if name != "tool_call":
            yield from _others(part, ("type", used, *MASK_KEYS), where)
        elif used:
            yield from _others(part, ("type", "id", used, *MASK_KEYS), where)
            yield from _unread_in_calls(part[used], f"{where}.{used}")
        else:
            yield from _unread_in_calls(part, where)


def _unread_in_calls(value: Any, where: str) -> Iterator[str]:
    """Yield the keys of one call or a list of them, or of its JSON text, that nothing reads."""
    if isinstance(value, str):
        value = json.loads(value)
    if isinstance(value, list):
        for call in value:
            yield from _unread_in_calls(call, f"{where}[]")
        return
    inner, read = value.get("function"), ("type", "id", *MASK_KEYS)
    if isinstance(inner, dict):
        yield from _others(value, (*read, "function"), where)
        yield from _others(inner, ("name", arguments_key(inner)), f"{where}.function")
    else:
        yield from _others(value, (*read, "name", arguments_key(value)), where)


class MeaningError(RowError):
    """A row means more than its text: a pair of answers, a verdict, a class or a choice."""


@functools.lru_cache(maxsize=1024)
def may_mean_more(columns: tuple[str, ...]) -> bool:
    """Return whether a row of these columns may be one that `check_meaning` refuses."""
    return any(map(_REJECTED.match, columns)) or not {
        *VERDICTS,
        *_CLASSES,
        *_CHOICES,
    }.isdisjoint(columns)


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
        isinstance(value, (str, list, dict)) and is_filled(value)
        for key, value in values.items()
        if _REJECTED.match(key)
    )
    if is_pair and not any(map(PREFERENCE.match, columns.values())):
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
    verdict = next((key for key in VERDICTS if is_flag(values.get(key))), None)
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
    named = [f"{field}: {path}" for field, path in columns.items() if path not in ("", field)]
    return f"format: {name}, columns: {{{', '.join(named)}}}" if named else ""


def _role_of(turn: Any) -> str:
    name = turn.get("role") or turn.get("from") if isinstance(turn, dict) else None
    return ROLES.get(name, "") if isinstance(name, str) else ""


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
        return _named("alpaca", columns)
    texts = [name for name, value in values.items() if isinstance(value, str)]
    text = _find_text(values, _TEXTS) or (texts[0] if len(texts) == 1 and not answer else "")
    return f"format: completion, columns: {{text: {text}}}" if text and not question else ""


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
