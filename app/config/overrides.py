"""Parse the overrides of a command line: quote values for Hydra's grammar, refuse unsafe ones.

Whether a key or a value exists is checked later, by `load` and `validation`. For a word of another
tool, `other_tools.yaml` has what to type here.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml  # type: ignore[import-untyped]

from app.config import verbs
from app.config.schema import Setting, suggest
from app.planning.hardware import split_name
from common.errors import MAX_PROBLEMS, UserError, nearest
from common.facts import hints_of
from common.installation import verb_command
from common.redaction import REDACTED, holds_token
from common.untrusted import LIMITS_VARIABLE, limits

WORD = re.compile(r"(?P<prefix>\+\+|\+|~)?(?P<key>[^=\s]+)=(?P<value>.*)", re.DOTALL)
_UNQUOTED = re.compile(r"(?!(?:null|true|false|nan|inf)$)[A-Za-z/][\w/.-]*", re.IGNORECASE)
"""a text that needs no quotes, and that Hydra does not read as another type"""
PLAIN_VALUE = re.compile(r"[A-Za-z0-9_./@:+*%?|$-]*")
_NUMBERED_ELEMENT = re.compile(r"\[|\.\d+(\.|$)")
_HYDRA_KEYS = re.compile(r"hydra(\.|$)|.*[/@]", re.DOTALL)
"""keys that configure Hydra itself, or that it would read as a group in another package"""
_OPTION_LIST = re.compile(r"\[([\w, ]+)\]")
"""a list of options, as in logger=[tensorboard,wandb]"""
GROUPS_WITH_PLUS = ("experiment", "sweep")
"""groups outside the defaults list: Hydra requires a plus sign before them, loft does not"""
_SECRET_NAMES = {"token", "api_key", "apikey", "secret", "password", "access_token", "hf_token"}
_REFERENCE = re.compile(r"\$\{[A-Za-z0-9_.\[\]]+\}")
"""`${key.of.another.setting}`; a nested one does not match, as it could form a resolver's name"""
MAX_TYPED = 350
"""maximum number of typed settings, each of which is parsed twice; no verb has as many"""
YAML_SUFFIXES = (".yaml", ".yml")
FILE_ALONE, EXPERIMENT = re.compile(r"\A[^=]*\.ya?ml\Z"), r"experiment=\g<0>"
"""a typed word that is the name of a YAML file alone, and what it stands for"""
SHORT = 64
"""length up to which a word exceeds no limit"""
_MAX_ITEMS = 4000
"""maximum number of items of a typed list or mapping"""
_BRACKETS = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[\[{(]|[\]})]""")
FILE = Path(__file__).with_name("other_tools.yaml")
ANY, VALUE = "any", "VALUE"
_VERBS_IN_ANSWERS = ("chat", "evaluate", "merge", "preview", "push", "serve", "train")


@dataclasses.dataclass(frozen=True, slots=True)
class Override:
    key: str
    value: Any
    for_hydra: str
    """the override in Hydra's grammar"""
    typed: str
    """the value as typed"""


def parse_overrides(
    words: Sequence[str], groups: Mapping[str, Sequence[str]]
) -> tuple[list[Override], list[str]]:
    """Parse the words of a command line; return the overrides, and the problems of the others.

    Whatever prefix was typed, Hydra receives groups of the defaults list without a prefix, other
    groups with `+`, and settings with `++`, so that it accepts any key; `validation` checks them.
    """
    overrides: list[Override] = []
    problems: list[str] = []
    if any(word.startswith("--") for word in words):
        words, problems = _split_off_dashed(words)
    for word in words:
        match = WORD.fullmatch(word := FILE_ALONE.sub(EXPERIMENT, word))
        if match is None:
            problems.append(f"{word}: expected key=value{_hint_for_bare_word(word, groups)}")
            continue
        key, value = verbs.RENAMED.get(match["key"], match["key"]), match["value"]
        key = verbs.TYPED_KEYS.get(key, key)
        typed = value
        implied: dict[str, str] = {}
        if key == "hardware":
            value, numbers = split_name(value)
            implied = {name: str(number) for name, number in numbers.items()}
        elif key == "logger" and (options := _OPTION_LIST.fullmatch(value)):
            value, _, others = options[1].replace(" ", "").partition(",")
            implied = {"also": f"[{others}]"}
        if len(word) > SHORT and (refused := over_typed_limit(key, value)) is not None:
            problems.append(refused)
        elif (refusal := safety_error(key, value)) is not None:
            problems.append(refusal)
        elif REDACTED in value:
            problems.append(
                f"{key}: {REDACTED} replaces a secret that was removed; type the secret instead "
                f"(or remove {REDACTED})"
            )
        elif match["prefix"] == "~":
            problems.append(
                f"{word}: settings cannot be removed; type {key}=null or choose another option"
            )
        elif _NUMBERED_ELEMENT.search(key):
            whole = _NUMBERED_ELEMENT.split(key)[0]
            problems.append(f"{word}: single elements of a list cannot be set; type {whole}=[...]")
        elif _HYDRA_KEYS.match(key):
            problems.append(f"command line: unknown key {key}={value}{nearest(key, groups)}")
        else:
            prefix = "" if key in groups else "++"
            prefix = "+" if key in GROUPS_WITH_PLUS else prefix
            try:
                overrides.append(_parse_override(key, value, prefix, typed))
                for name, text in implied.items():
                    overrides.append(_parse_override(f"{key}.{name}", text, "++", text))
            except UserError as error:
                problems += error.problems
    return overrides, problems


def check_words(verb: str, words: Sequence[str], groups: Iterable[str]) -> None:
    """Raise UserError if more keys are unknown than are listed, or too many settings are typed.

    Before any value is parsed, which takes milliseconds each. Fewer unknown keys are explained with
    the values (`validation`).
    """
    keys = [match["key"] for word in words if (match := WORD.fullmatch(word)) is not None]
    refuse_unknown(verb, [key for key in keys if key not in groups], lambda _: "command line:")
    if len(words) > MAX_TYPED:
        raise UserError(
            f"command line: {len(words):,} settings (limit {MAX_TYPED}): write them into an "
            "experiment, and type experiment=PATH.yaml"
        )


def refuse_unknown(verb: str, keys: Iterable[str], where: Callable[[str], str]) -> None:
    """Raise UserError that names the first unknown keys and counts the rest, if there are many."""
    unknown = [key for key in keys if not verbs.may_be_key(verb, key)]
    if len(unknown) <= MAX_PROBLEMS:
        return
    groups = list(hints_of(verbs.VERBS[verb]))
    named = [
        f"{where(key)} unknown key {key[:80]}{suggest(key[:80], groups, verbs.all_settings(verb))}"
        for key in unknown[:MAX_PROBLEMS]
    ]
    raise UserError(named + ["unknown key"] * (len(unknown) - len(named)))


def keys_in(value: Any, key: str = "") -> Iterator[str]:
    """Yield the full keys of the mappings inside the value of `key`."""
    parts: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        parts = [(f"{key}.{name}" if key else str(name), part) for name, part in value.items()]
        yield from (full for full, _ in parts)
    elif isinstance(value, list):
        parts = [(f"{key}[{index}]", part) for index, part in enumerate(value)]
    for full, part in parts:
        yield from keys_in(part, full)


def over_typed_limit(key: str, value: str) -> str | None:
    """Return the limit that a typed key or value exceeds: nesting, or number of items; or None."""
    most = limits().yaml_depth
    depth = deepest = 0
    for bracket in _BRACKETS.findall(value):
        depth += 1 if bracket in "[{(" else -1 if bracket in "]})" else 0
        deepest = max(deepest, depth)
    if max(deepest, key.count(".")) > most:
        return (
            f"{key[:40]}={value[:40]}...: nested too deep (limit {most}; "
            f"{LIMITS_VARIABLE}=yaml_depth=NUMBER changes it)"
        )
    if value.startswith(("[", "{")) and (items := value.count(",")) > _MAX_ITEMS:
        return (
            f"{key}={value[:40]}...: {items:,} items (limit {_MAX_ITEMS:,}): write them into an "
            "experiment, and type experiment=PATH.yaml"
        )
    return None


def _split_off_dashed(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words without `--name value` and `--name=value`, and what to type instead."""
    others, problems = [], []
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        if not word.startswith("--") or len(word) == 2:
            others.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        if not equals and remaining and WORD.fullmatch(remaining[0]) is None:
            value = "" if remaining[0].startswith("-") else remaining.pop(0)
        typed = f"{word} {value}" if value and not equals else word
        name = name.replace("-", "_")
        if (advice := answer_for(name, value, verbs.SETTINGS)) is None:
            # The nearest setting, or the one that other tools call so.
            found = re.search(
                r"(?:did you mean|type) ([^\s?=]+)", suggest(name, [], verbs.SETTINGS)
            )
            advice = f"type {found[1]}={value or 'VALUE'}" if found else "--help shows the settings"
        problems.append(f"{typed}: settings are typed without dashes, as KEY=VALUE; {advice}")
    return others, problems


def _parse_override(key: str, value: str, prefix: str, typed: str) -> Override:
    """Parse an override as typed, else with quotes around what Hydra's grammar does not accept."""
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
                f"{key}={value} lists several values: add -m to run each of them, "
                f"or type '{key}=[{value}]' for a list, \"{key}='{value}'\" for text"
            )
        renamed = python_keys(key, parsed)
        for as_typed, known in verbs.TYPED_KEYS.items() if renamed != parsed else ():
            name, in_python = as_typed.rpartition(".")[2], known.rpartition(".")[2]
            text = re.sub(rf"(?<=[{{,\s]){name}(?=\s*:)", in_python, text)
        return Override(key, renamed, f"{prefix}{key}={text}", typed)
    raise UserError(f"{key}={value}: this value cannot be parsed; quote it: \"{key}='...'\"")


def python_keys(key: str, value: Any) -> Any:
    """Return the value of `key` with the keys inside it as Python spells them (`TYPED_KEYS`).

    If both spellings are present, the typed one stays, and is reported as an unknown key.
    """
    if not isinstance(value, dict):
        return value
    renamed = {}
    for name, part in value.items():
        full = f"{key}.{name}" if key else str(name)
        known = verbs.TYPED_KEYS[full].rpartition(".")[2] if full in verbs.TYPED_KEYS else name
        renamed[name if known in value else known] = python_keys(full, part)
    return renamed


def _hint_for_bare_word(word: str, groups: Mapping[str, Sequence[str]]) -> str:
    for group, options in groups.items():
        if word in options:
            return f"; did you mean {group}={word}?"
    for group, aliases in verbs.OPTION_ALIASES.items():
        if word in aliases:
            return f"; type {group}={aliases[word]}"
    return "; `--help` shows the settings" if word.startswith("-") else ""


def quote_value(value: str) -> str:
    """Quote the parts of an override's value that Hydra's grammar does not accept.

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
            end = position + 1
            while end < len(value) and value[end] != letter:
                end += 2 if value[end] == "\\" else 1
            scalar, position = value[position : end + 1], end + 1
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
    return _in_quotes(scalar)


def _in_quotes(scalar: str) -> str:
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", scalar)
    trailing = len(escaped) - len(escaped.rstrip("\\"))
    return f"'{escaped}{chr(92) * trailing}'"


def safety_error(key: str, value: Any, name: str | None = None) -> str | None:
    """Return why a key and its value are unsafe: secrets, code, resolvers; None if they are not.

    Never repeats the text of a secret. `name`: key of the part of `value` under examination.
    """
    name = key.rpartition(".")[2] if name is None else name
    text = value if isinstance(value, str) else ""
    # plan.token=5 is a misspelt plan.tokens, not a secret.
    is_number = len(str(value)) <= 12 and re.fullmatch(r"[\d.]+(e\d+)?", str(value)) is not None
    is_secret = name.lower() in _SECRET_NAMES and not (name == "token" and is_number)
    if is_secret or holds_token(text):
        return (
            f"{key}: secrets do not go into settings, where files and process lists show them; "
            "export HF_TOKEN, or run `hf auth login`"
        )
    if text == "???":
        return (
            f"{key}=???: ??? stands for a value to fill in; write the value, or leave the key out"
        )
    if name in ("_target_", "_partial_", "_recursive_", "_convert_"):
        return f"{key}: {name} is not allowed; settings never name code to run"
    if "${" in _REFERENCE.sub("", text):
        return (
            f"{key}={text}: resolvers like ${{oc.env:NAME}} are not allowed, because their values "
            "end up in files; type the value (`${key.of.another.setting}` is allowed)"
        )
    parts: list[tuple[Any, Any]] = []
    if isinstance(value, (dict, list)):
        parts = [*value.items()] if isinstance(value, dict) else [("", part) for part in value]
    refusals = (safety_error(key, part, str(inner)) for inner, part in parts)
    return next(filter(None, refusals), None)


def words_of_mapping(
    values: Mapping[str, Any], hints: Mapping[str, Any], prefix: str = ""
) -> list[str]:
    """Return the values of a mapping as words of a command line; sections may be nested."""
    words: list[str] = []
    for name, value in values.items():
        hint = hints.get(name)
        if isinstance(value, Mapping) and dataclasses.is_dataclass(hint):
            words += words_of_mapping(value, hints_of(cast("type", hint)), f"{prefix}{name}.")
        else:
            words.append(f"{prefix}{name}={_text_of(value)}")
    return words


def _text_of(value: Any) -> str:
    """Return a value as Hydra's grammar reads it back, a text in quotes unless it is one word."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_text_of(each)}' for key, each in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text_of, value))}]"
    if value is None or isinstance(value, (bool, int, float)):
        return "null" if value is None else str(value).lower()
    text = str(value)
    return text if _UNQUOTED.fullmatch(text) else _in_quotes(text)


@dataclass(frozen=True, slots=True)
class OtherTools:
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
        if key not in by_key:
            return None
        if (option := by_key[key].facts.option_aliases.get(value.lower())) is not None:
            return f"type {key}={option}"
        return f"type {shlex.quote(f'{key}={value}') if value else f'{key}={VALUE}'}"
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
