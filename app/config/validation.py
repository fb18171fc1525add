"""Explain what is wrong with composed settings: every problem with its file and line.

Runs only after typing the settings has failed. Checks names, types and choices; bounds of numbers
and combinations of settings are checked in `preflight/couplings`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from app.config import schema
from app.config.conf_files import CONF, ConfFile, list_groups
from app.config.overrides import Override, answer_for, safety_error
from app.config.verbs import only_in
from app.process.launch import is_child, is_first_rank
from common.errors import nearest
from common.facts import as_typed, expected, hints_of, takes
from common.redaction import redact
from common.text import printable, shortened

_COMMAND_LINE = "command line:"
_MAX_LISTED = 12
"""maximum number of options listed in a message"""


@dataclasses.dataclass(frozen=True, slots=True)
class KnownSettings:
    """The settings that exist: the verb's schema, with the schemas of the chosen options."""

    verb: type
    parts: dict[str, type]
    """group -> schema of its chosen option"""
    options: dict[str, str]
    """group -> name of its chosen option"""
    all_options: dict[str, dict[str, type]]
    """group -> option -> schema, for groups whose settings depend on the option"""
    replaced: frozenset[str] = frozenset()
    """groups whose option the command line chose: an experiment's settings of another option of
    the group are dropped instead of reported"""

    def walk(self, values: dict[str, Any]) -> Iterator[schema.Leaf | schema.Unknown]:
        """Yield each leaf and each unknown key of `values`."""
        hints = hints_of(self.verb) | self.parts
        for name, value in values.items():
            if name in hints:
                yield from schema.walk(value, hints[name], name, self.verb, name)
            else:
                yield schema.Unknown(name, None, value)

    def all_settings(self) -> list[schema.Setting]:
        """List the settings of the verb, with those of the chosen options."""
        chosen = {group: {self.options.get(group, ""): part} for group, part in self.parts.items()}
        return schema.list_settings(self.verb, chosen)

    def problem_of(self, found: schema.Leaf | schema.Unknown, key: str, typed: str) -> str | None:
        """Return what is wrong with one key or value, without its place; None if nothing is.

        `key`, `typed`: what to name, as typed; for an unknown key `method` maybe `method.beta`.
        """
        typed = shortened(typed)
        if isinstance(found, schema.Leaf):
            refusal = safety_error(found.key, found.value)
            is_reference = isinstance(found.value, str) and found.value.startswith("${")
            if refusal is not None or is_reference:
                return refusal
            if _takes_value(found):
                return self._problem_of_choice(found, typed)
            hint = hints_of(found.owner)[found.field]
            if schema.is_section(hint):
                return describe_shape(found.key, found.value, self.parts.get(found.key, hint))
            return f"{key}={typed}: expected {schema.describe_type(hint)}"
        if (refusal := safety_error(found.key, found.value)) is not None:
            return refusal
        group = found.key.partition(".")[0]
        if (option := self.option_with(found.key)) is not None:
            chosen = self.options.get(group)
            return f"{found.key}: a setting of {group}={option}, but {group}={chosen} is chosen"
        return f"unknown key {key}={typed}{self._hint_for(found, key, typed)}"

    def _hint_for(self, found: schema.Unknown, key: str, typed: str) -> str:
        is_of_a_verb = only_in(key)
        if "." in key and is_of_a_verb:
            return is_of_a_verb
        if (answer := self._answer_for(found, key, typed)) is not None:
            return f"; {answer}"
        if is_of_a_verb:
            return is_of_a_verb
        name = key.rpartition(".")[2]
        siblings, settings = list(hints_of(found.owner or self.verb)), self.all_settings()
        if key != found.key and (hint := schema.suggest_by_name(name, typed, settings)):
            return hint
        hint = schema.suggest(found.key, siblings, settings, typed)
        return hint or f"; expected one of {', '.join(siblings)}"

    def _answer_for(self, found: schema.Unknown, key: str, typed: str) -> str | None:
        """Return what to type if the key is a word of another tool; None if it is not."""
        section, _, leaf = found.key.rpartition(".")
        settings = schema.list_settings(self.verb, self.all_options)
        for word in dict.fromkeys((key, found.key, key.rpartition(".")[2], leaf)):
            answer = answer_for(word.lower(), typed, settings)
            # In a section of ours, a key that is nearly right is not a word of another tool.
            if answer and found.owner is not None and not answer.startswith(f"type {section}."):
                answer = None if nearest(leaf, list(hints_of(found.owner))) else answer
            if answer is not None:
                return answer
        return None

    def option_with(self, key: str) -> str | None:
        """Return the option of `key`'s group that has a setting which the chosen option lacks."""
        group, _, rest = key.partition(".")
        for option, option_schema in self.all_options.get(group, {}).items():
            if rest in hints_of(option_schema):
                return option
        return None

    def _problem_of_choice(self, leaf: schema.Leaf, typed: str) -> str | None:
        group, _, name = leaf.key.partition(".")
        if name == "name" and group in self.parts:
            if self.options.get(group, leaf.value) == leaf.value:
                return None
            return (
                f"{leaf.key}={leaf.value}: expected {self.options[group]}; type "
                f"{group}={leaf.value} to choose another option"
            )
        facts, hint = leaf.facts, hints_of(leaf.owner)[leaf.field]
        if facts.bounds or takes(facts, hint, leaf.value):
            return None  # bounds are checked together with combinations, in preflight/couplings
        if (ours := facts.option_aliases.get(typed.lower())) is not None:
            return f"{leaf.key}={typed}: expected {expected(facts, hint)}; type {leaf.key}={ours}"
        guess = nearest(typed, [str(choice) for choice in facts.choices])
        return f"{leaf.key}={typed}: expected {expected(facts, hint)}{guess}"


def describe_shape(key: str, value: Any, section: type) -> str:
    """Return what is wrong with a value that stands in place of a section's settings."""
    first = next((name for name in hints_of(section) if name != "name"), "name")
    shown = "null" if value is None else as_typed(value)[:80]
    fix = f"write settings below it (such as `{key}: {{{first}: ...}}`), or remove it"
    options = list_groups(CONF).get(key, [])
    if len(options) < 2:
        return f"{key}={shown}: {key} is a section of settings: {fix}"
    words = [str(each) for each in (value if isinstance(value, list) else [value])]
    names = ", ".join(options) if len(options) <= _MAX_LISTED else f"--help {key} lists them"
    wanted = next((word for word in words if word in options), f"NAME ({names})")
    choose = f"choose an option under defaults, by `- override /{key}: {wanted}`"
    return f"{key}={shown}: {choose}, or {fix}"


@dataclasses.dataclass(frozen=True)
class Sources:
    """Everything that settings were composed from: files in composition order, then overrides."""

    read_files: Callable[[], Sequence[ConfFile]]
    """called when the files are first needed"""
    overrides: Sequence[Override] = ()

    @functools.cached_property
    def files(self) -> Sequence[ConfFile]:
        return self.read_files()

    def source_of(self, key: str) -> ConfFile | None:
        """Return the file that set full key `key` last; None for the command line."""
        if any(_sets_key(override, key) for override in self.overrides):
            return None
        for file in reversed(self.files):
            if file.sets(key):
                return file
        files_of_group = [file for file in self.files if file.package == key.partition(".")[0]]
        return (files_of_group or self.files)[-1]

    def as_typed(self, found: schema.Leaf | schema.Unknown) -> list[tuple[str, str]]:
        """Return (key, value) as typed; of an unknown key one pair for each of its overrides."""
        if isinstance(found, schema.Unknown):
            parts = f"{found.key}."
            typed = [each for each in self.overrides if f"{each.key}.".startswith(parts)]
        else:
            typed = [each for each in self.overrides if each.key == found.key][-1:]
            typed = [each for each in typed if each.value == found.value]
        value = found.value[0] if found.key.endswith("]") else found.value
        pairs = [(each.key, each.typed) for each in typed]
        return pairs or [(found.key, as_typed(value))]

    def written(self, key: str) -> str:
        """Return the text of a single value as written, as far as its line shows it."""
        name = re.sub(r"\[\d+\]$", "", key).rpartition(".")[2]
        typed = [each for each in self.overrides if _sets_key(each, key)]
        file = self.source_of(key)
        if file is not None:
            line = file.text_of(key)
        elif typed:
            line = f"{name}: {typed[-1].typed}" if typed[-1].key == key else typed[-1].typed
        else:
            return ""
        found = re.search(rf"\b{name}['\"]?\s*:\s*([^,}}\]#\s]+)|-\s+([^#\s]+)", line)
        return (found[1] or found[2]) if found else line

    def where(self, key: str) -> str:
        """Return where `key` was set: `conf/experiment/x.yaml:12` or `command line:`."""
        source = self.source_of(key)
        return _COMMAND_LINE if source is None else source.where(key)


def _sets_key(override: Override, key: str) -> bool:
    """Return whether an override sets full key `key`, directly or inside its value."""
    rest = key.removeprefix(override.key)
    if rest == key or rest[:1] not in ("", ".", "["):
        return override.key.startswith(f"{key}.")
    value = override.value
    for step in _split_key(rest):
        if isinstance(value, list):
            value = dict(enumerate(value))
        if not isinstance(value, dict) or step not in value:
            return False
        value = value[step]
    return True


def _split_key(key: str) -> list[str | int]:
    parts = filter(None, key.replace("[", ".[").split("."))
    return [int(part[1:-1]) if part.startswith("[") else part for part in parts]


def find_problems(
    values: dict[str, Any], settings: KnownSettings, sources: Sources
) -> tuple[dict[str, Any], list[str]]:
    """Return the values with what can be corrected, and every other problem with its place.

    Corrected: a single word for a list of text becomes a list, 1e9 for an int becomes an int, 1e5
    typed for a text stays as typed, and an experiment's settings of an option that the command line
    replaced are dropped with a note.
    """
    values = copy.deepcopy(values)
    problems: dict[str, None] = {}
    dropped: dict[str, list[str]] = {}
    for found in list(settings.walk(values)):
        if _is_word_for_list(found, sources):
            _replace(values, found.key, [found.value])
        elif isinstance(found, schema.Leaf) and is_converted_text(found):
            overrides = [each for each in sources.overrides if each.key == found.key]
            if not overrides and (problem := _problem_of_text(found, sources)) is not None:
                problems[f"{sources.where(found.key)} {problem}"] = None
            else:
                (value,) = found.value if isinstance(found.value, list) else [found.value]
                _replace(values, found.key, overrides[-1].typed if overrides else str(value))
        elif (whole := _whole_number(found)) is not None:
            _replace(values, found.key, whole)
        elif (file := _file_replaced_by_option(found, settings, sources)) is not None:
            dropped.setdefault(file.path.stem, []).append(found.key)
            _replace(values, found.key)
        else:
            for key, typed in sources.as_typed(found):
                if (problem := settings.problem_of(found, key, typed)) is not None:
                    problems[f"{sources.where(found.key)} {problem}"] = None
    if not problems and safety_error("", values) is not None:
        # Inside model.architecture, which takes any key, `walk` visits no single key.
        for file in sources.files:
            for key in map(file.full_key, file.lines):
                if (refusal := safety_error(key, None)) is not None:
                    problems[f"{file.where(key)} {refusal}"] = None
    if not problems and dropped:
        chosen = ", ".join(f"{g}={settings.options[g]}" for g in sorted(settings.replaced))
        for name, keys in dropped.items():
            print_note(f"note: {name}'s {', '.join(keys)} do not apply to {chosen}")
    return values, list(problems)


def is_converted_text(found: schema.Leaf | schema.Unknown) -> bool:
    """Return whether YAML or Hydra made a number or a truth value of a setting that is text."""
    if not isinstance(found, schema.Leaf):
        return False
    is_list = isinstance(found.value, list)
    is_text = found.hint == list[str] if is_list else found.hint is str
    values = found.value if is_list else [found.value]
    is_converted = any(isinstance(value, (bool, int, float)) for value in values)
    return is_text and is_converted and not found.facts.choices


def _problem_of_text(found: schema.Leaf, sources: Sources) -> str | None:
    """Return what to write instead of a text that would be changed; None if it stays as written."""
    value = found.value[0] if isinstance(found.value, list) else found.value
    written = sources.written(found.key)
    if str(value) == written:
        return None
    # The text of a list stands for no item of it.
    typed = written if written and written[0] not in "[{" else as_typed(value)
    quoted = f"'{typed}'" if isinstance(found.value, list) else f"{found.field}: '{typed}'"
    return (
        f"{found.key}={typed}: expected text, but without quotes this is "
        f"{as_typed(value)}; write {quoted}"
    )


def _whole_number(found: schema.Leaf | schema.Unknown) -> int | None:
    if not (isinstance(found, schema.Leaf) and isinstance(found.value, float)):
        return None
    # A small one may come from a search between 1.0 and 8.0, whose next trial is not whole.
    is_whole = found.value.is_integer() and abs(found.value) >= 1000
    return int(found.value) if found.hint is int and is_whole else None


def _is_word_for_list(found: schema.Leaf | schema.Unknown, sources: Sources) -> bool:
    """Return whether a single word was typed for a list of text."""
    if not (isinstance(found, schema.Leaf) and isinstance(found.value, str) and found.value):
        return False
    is_reference = found.value.startswith("${")
    return found.hint == list[str] and not is_reference and sources.source_of(found.key) is None


def _file_replaced_by_option(
    found: schema.Leaf | schema.Unknown, settings: KnownSettings, sources: Sources
) -> ConfFile | None:
    """Return the experiment that sets this key of an option which the command line replaced."""
    group = found.key.partition(".")[0]
    if not isinstance(found, schema.Unknown) or group not in settings.replaced:
        return None
    file = sources.source_of(found.key)
    is_of_experiment = file is not None and not file.package
    return file if is_of_experiment and settings.option_with(found.key) is not None else None


def _replace(values: dict[str, Any], key: str, value: Any = None) -> None:
    """Set a full key in nested values; remove it if `value` is None."""
    *path, name = _split_key(key)
    part: Any = values
    for step in path:
        part = part[step]
    if value is None:
        del part[name]
    else:
        part[name] = value


@functools.cache
def _node_of(schema: type) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.structured(schema)


def _takes_value(leaf: schema.Leaf) -> bool:
    from omegaconf.errors import OmegaConfBaseException

    try:
        _node_of(leaf.owner)[leaf.field] = leaf.value
    except OmegaConfBaseException:
        return False
    return True


def print_note(note: str) -> None:
    """Print a note on stderr, once for all ranks and the process that started them."""
    if is_first_rank() and not is_child():
        print(printable(redact(note)), file=sys.stderr)
