"""Judge what a row seems to be: settings to suggest, and rows that mean more than their text.

Never reads a row for training.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from common.text import listed
from data_modules.format.columns import PREFERENCE, VERDICTS, is_filled
from data_modules.format.fields import RowError, is_turns
from data_modules.format.turns import ROLES
from data_modules.format.weights import is_flag

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


class MeaningError(RowError):
    """A row means more than its text: a pair of answers, a verdict, a class or a choice."""


@functools.lru_cache(maxsize=1024)
def may_mean_more(columns: tuple[str, ...]) -> bool:
    """Return whether a row of these columns may be one that `check_meaning` refuses."""
    return any(map(_is_rejected, columns)) or not {
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
    is_pair = any(_is_rejected(key) and _is_answer(values[key]) for key in values)
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
    label = next((key for key in _CLASSES if _is_class(values.get(key))), None)
    text = next((key for key in ("text", "content") if key in values), None)
    if label and text and name == "completion":
        raise MeaningError(
            f"{found}: texts with their class (classification); to train a head that tells the "
            f"classes apart, type objective=classify; to train the model to answer '{text}' with "
            f"'{label}', set {{path: ..., format: alpaca, columns: {{instruction: {text}, output: "
            f"{label}}}}} (classes as words); to train on '{text}' alone, format: completion"
        )


def _is_rejected(name: str) -> bool:
    return PREFERENCE.match(name) is not None and name.startswith("rejected")


def _is_answer(value: Any) -> bool:
    return isinstance(value, (str, list, dict)) and is_filled(value)


def _is_class(value: Any) -> bool:
    return isinstance(value, (str, int, float)) and value != ""


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
