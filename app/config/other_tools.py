"""What to type here for a word of another tool: `other_tools.yaml` has the words."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from app.config.schema import Setting
from common.installation import verb_command

FILE = Path(__file__).with_suffix(".yaml")
ANY, VALUE = "any", "VALUE"
_VERBS_IN_ANSWERS = ("chat", "evaluate", "merge", "preview", "push", "serve", "train")


@dataclass(frozen=True, slots=True)
class OtherTools:
    """The words of other tools."""

    keys: dict[str, str]
    """word -> the setting that takes the same values"""
    values: dict[str, dict[str, str]]
    """word -> value (or `any`) -> what to type"""
    advice: dict[str, str]
    """word -> a sentence that begins with what to do"""


@functools.cache
def read_other_tools() -> OtherTools:
    """Read the table of words; only an error needs it."""
    table = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    advice = {word: row["answer"] for row in table["advice"] for word in row["words"]}
    return OtherTools(table["keys"], table["values"], advice)


def answer_for(word: str, value: str, settings: Iterable[Setting]) -> str | None:
    """Return what to type for `word=value` of another tool; None if it is not known.

    `settings`: those of the verb, to which an answer is limited.
    """
    others = read_other_tools()
    by_key = {each.typed_key: each for each in settings}
    if (key := others.keys.get(word)) is not None:
        return _with_value(by_key[key], value) if key in by_key else None
    by_value = others.values.get(word, {})
    if typed := by_value.get(value.lower(), by_value.get(ANY)):
        first = typed.partition("=")[0].removeprefix("+")
        if first not in by_key and first != "experiment":
            return None
        return f"type {typed.replace(VALUE, shlex.quote(value) if value else VALUE)}"
    if (sentence := others.advice.get(word)) is None:
        return None
    commands = {verb: verb_command(verb) for verb in _VERBS_IN_ANSWERS}
    return sentence.format(upper=word.upper(), **commands)


def _with_value(setting: Setting, value: str) -> str:
    """Return `type KEY=VALUE` with the value as it is called here."""
    key = setting.typed_key
    option = setting.facts.option_aliases.get(value.lower())
    if option is not None:
        return f"type {key}={option}"
    return f"type {shlex.quote(f'{key}={value}') if value else f'{key}={VALUE}'}"
