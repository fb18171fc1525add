"""What a person types, word by word: quoting for Hydra's grammar, and what is refused unread.

Knows the grammar, not the settings.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from app.config.schema import suggest
from app.config.verbs import OPTIONS_ELSEWHERE, SETTINGS, TYPED_KEYS
from app.planning.hardware import split_name
from app.process.errors import UserError, nearest
from data_modules import REDACTED, holds_token

WORD = re.compile(r"(?P<prefix>\+\+|\+|~)?(?P<key>[^=\s]+)=(?P<value>.*)", re.DOTALL)
PLAIN_VALUE = re.compile(r"[A-Za-z0-9_./@:+*%?|$-]*")
NUMBERED_ELEMENT = re.compile(r"\[|\.\d+(\.|$)")
HYDRAS_OWN = re.compile(r"hydra(\.|$)|.*[/@]", re.DOTALL)
"""keys that configure Hydra itself, or that it would read as a group in another place"""
SEVERAL = re.compile(r"\[([\w, ]+)\]")
"""a list of options, as of loggers"""
ADDED_GROUPS = ("experiment", "sweep")
"""groups outside the defaults list: Hydra wants a plus sign before them, a person need not"""
SECRET_NAMES = {"token", "api_key", "apikey", "secret", "password", "access_token", "hf_token"}

REFERENCE = re.compile(r"\$\{[A-Za-z0-9_.\[\]]+\}")
"""`${key.of.another.setting}`, whole: one inside another could form a resolver's name"""


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """One override that a person typed: its key and value, and the override in Hydra's grammar."""

    key: str
    value: Any
    override: str


def read_words(
    words: Sequence[str], groups: Mapping[str, Sequence[str]]
) -> tuple[list[Given], list[str]]:
    """Parse all words; returns what was given, and the problems.

    Groups of the defaults list go to Hydra bare, added groups with a plus sign, settings with two
    (whether they exist is checked later, better than Hydra does), however they were typed.
    """
    given: list[Given] = []
    problems: list[str] = []
    if any(word.startswith("--") for word in words):
        words, problems = _take_dashed(words)
    for word in words:
        match = WORD.fullmatch(word)
        if match is None:
            problems.append(f"{word}: expected key=value{_hint_for_word(word, groups)}")
            continue
        key, value = TYPED_KEYS.get(match["key"], match["key"]), match["value"]
        beside: dict[str, str] = {}
        if key == "hardware":
            value, numbers = split_name(value)
            beside = {name: str(number) for name, number in numbers.items()}
        elif key == "logger" and (several := SEVERAL.fullmatch(value)):
            value, _, others = several[1].replace(" ", "").partition(",")
            beside = {"also": f"[{others}]"}
        if (refusal := refuse(key, value)) is not None:
            problems.append(refusal)
        elif REDACTED in value:
            problems.append(
                f"{key}: {REDACTED} stands where a secret was left out; type the secret in its "
                f"place (or remove {REDACTED})"
            )
        elif match["prefix"] == "~":
            problems.append(
                f"{word}: settings cannot be removed; type {key}=null or another option"
            )
        elif NUMBERED_ELEMENT.search(key):
            whole = NUMBERED_ELEMENT.split(key)[0]
            problems.append(f"{word}: elements of a list cannot be set alone; type {whole}=[...]")
        elif HYDRAS_OWN.match(key):
            problems.append(f"command line: unknown key {key}={value}{nearest(key, groups)}")
        else:
            prefix = "" if key in groups else "++"
            prefix = "+" if key in ADDED_GROUPS else prefix
            try:
                given.append(_read_word(key, value, prefix))
                for name, text in beside.items():
                    given.append(_read_word(f"{key}.{name}", text, "++"))
            except UserError as error:
                problems += error.problems
    return given, problems


def _take_dashed(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Take `--name value` and `--name=value` out of the words; returns what to type instead."""
    left, problems = [], []
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        if not word.startswith("--") or len(word) == 2:
            left.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        if not equals and remaining and WORD.fullmatch(remaining[0]) is None:
            value = "" if remaining[0].startswith("-") else remaining.pop(0)
        typed = f"{word} {value}" if value and not equals else word
        name = name.replace("-", "_")
        meant = meant_by(name)
        example = f"{meant or name}={value or 'VALUE'}"
        known = f"type {example}" if meant else "--help shows the settings"
        problems.append(f"{typed}: settings are typed without dashes, as KEY=VALUE; {known}")
    return left, problems


def meant_by(name: str) -> str:
    """Return the key of a setting that other tools call `name`, empty where it is not known."""
    guess = suggest(name, [], SETTINGS)
    found = re.search(r"(?:did you mean|type) ([^\s?=]+)", guess)
    return found[1] if found else ""


def _read_word(key: str, value: str, prefix: str) -> Given:
    """Parse a word as it stands, else with quotes around what Hydra's grammar does not take."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    for quote in (str, quote_value):
        text = quote(value)
        try:
            override = OverridesParser.create().parse_override(f"{key}={text}")
            parsed = None if override.is_sweep_override() else override.value()
        except (HydraException, OmegaConfBaseException):
            continue
        if override.is_sweep_override():
            raise UserError(
                f"{key}={value} lists several values: add -m to try each of them, "
                f"or type '{key}=[{value}]' for a list, \"{key}='{value}'\" for text"
            )
        meant = keys_in_python(key, parsed)
        text = text if meant == parsed else _keys_in_text(text)
        return Given(key, meant, f"{prefix}{key}={text}")
    raise UserError(f"{key}={value}: this value cannot be read; type \"{key}='...'\" around it")


def keys_in_python(key: str, value: Any) -> Any:
    """Return a given value with the keys in it as Python has them; `key` is what it is given to.

    Where both spellings stand side by side, what was typed stays, and is an unknown key.
    """
    if not isinstance(value, dict):
        return value
    renamed = {}
    for name, part in value.items():
        full = f"{key}.{name}" if key else str(name)
        known = TYPED_KEYS[full].rpartition(".")[2] if full in TYPED_KEYS else name
        renamed[name if known in value else known] = keys_in_python(full, part)
    return renamed


def _keys_in_text(mapping: str) -> str:
    for typed, known in TYPED_KEYS.items():
        name, in_python = typed.rpartition(".")[2], known.rpartition(".")[2]
        mapping = re.sub(rf"(?<=[{{,\s]){name}(?=\s*:)", in_python, mapping)
    return mapping


def _hint_for_word(word: str, groups: Mapping[str, Sequence[str]]) -> str:
    homes = [group for group, options in groups.items() if word in options]
    if homes:
        return f"; did you mean {homes[0]}={word}?"
    elsewhere = {name: group for group, names in OPTIONS_ELSEWHERE.items() for name in names}
    if word in elsewhere:
        return f"; type {elsewhere[word]}={OPTIONS_ELSEWHERE[elsewhere[word]][word]}"
    return "; `--help` shows the settings" if word.startswith("-") else ""


def quote_value(value: str) -> str:
    """Quote the parts of an override's value that Hydra's grammar would stumble over.

    Lists and mappings keep their structure: `[{path: a=b.json}]` -> `[{path: 'a=b.json'}]`.
    """
    if not value.startswith(("[", "{")):
        return _quoted(value)
    pieces: list[str] = []
    nesting: list[str] = []
    scalar, at_key, position = "", False, 0
    while position < len(value):
        letter = value[position]
        if letter in "'\"" and not scalar.strip():
            end = _end_of_quote(value, position)
            scalar, position = value[position:end], end
            continue
        separates = at_key and letter == ":"
        if letter in "[]{}," or separates:
            pieces += [_quoted(scalar.strip()) if not separates else scalar.strip(), letter]
            scalar = ""
            if letter in "[{":
                nesting.append(letter)
            elif letter in "]}" and nesting:
                nesting.pop()
            at_key = not separates and bool(nesting) and nesting[-1] == "{" and letter in "{,"
        else:
            scalar += letter
        position += 1
    return "".join(pieces) + scalar


def _quoted(scalar: str) -> str:
    if not scalar or scalar[0] in "'\"" or PLAIN_VALUE.fullmatch(scalar):
        return scalar
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", scalar)
    trailing = len(escaped) - len(escaped.rstrip("\\"))
    return f"'{escaped}{chr(92) * trailing}'"


def _end_of_quote(value: str, start: int) -> int:
    position = start + 1
    while position < len(value) and value[position] != value[start]:
        position += 2 if value[position] == "\\" else 1
    return min(position + 1, len(value))


def _is_number(value: Any) -> bool:
    """Tell whether a value is a number of a misspelt setting (plan.token=5), not a secret."""
    return len(str(value)) <= 12 and re.fullmatch(r"[\d.]+(e\d+)?", str(value)) is not None


def refuse(key: str, value: Any, name: str | None = None) -> str | None:
    """Say why a given key and value are refused unread: secrets, code, the environment.

    The text of a secret is never repeated. `name`: of the part of the value that is looked at.
    """
    name = key.rpartition(".")[2] if name is None else name
    text = value if isinstance(value, str) else ""
    is_secret = name.lower() in SECRET_NAMES and not (name == "token" and _is_number(value))
    if is_secret or holds_token(text):
        return (
            f"{key}: secrets do not go into settings, where files and process lists show them; "
            "export HF_TOKEN, or run `hf auth login`"
        )
    if name in ("_target_", "_partial_", "_recursive_", "_convert_"):
        return f"{key}: {name} is refused; settings never name code to run"
    if "${" in REFERENCE.sub("", text):
        return (
            f"{key}={text}: resolvers like ${{oc.env:NAME}} are refused, since their values "
            "end up in files; type the value (`${key.of.another.setting}` is fine)"
        )
    parts: list[tuple[Any, Any]] = []
    if isinstance(value, (dict, list)):
        parts = [*value.items()] if isinstance(value, dict) else [("", part) for part in value]
    refusals = (refuse(key, part, str(inner)) for inner, part in parts)
    return next(filter(None, refusals), None)
