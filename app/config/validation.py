"""Check every key and value that was given, in files and on the command line, against the schemas.

Finds all problems at once, each with the place it comes from. Only names, types and choices are
checked here; numbers and what does not go together in preflight/couplings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from app.config import schema
from app.config.conf_files import ConfFile
from app.config.overrides import Given, refuse
from app.process.errors import nearest
from data_modules import expected, facts_of, hints_of, takes

TakesValue = Callable[[schema.Leaf], bool]
"""whether a value can become what its field is declared as"""


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """The names that exist: the verb's schema, with the schema of each part that was chosen."""

    verb: type
    parts: dict[str, type]
    """group -> schema of the option that was chosen for it"""
    options: dict[str, str]
    """group -> that option's name"""
    other_options: dict[str, dict[str, type]]
    """group -> option -> schema, for parts whose settings depend on the option"""
    takes_value: TakesValue
    replaced: frozenset[str] = frozenset()
    """groups whose option the command line chose: an experiment's settings for another option of
    the group are then left out instead of refused"""

    def walk(self, values: dict[str, Any], package: str = "") -> Iterator[Any]:
        """Yield each leaf and each unknown key of `values`, which stand under `package`."""
        hints = hints_of(self.verb) | self.parts
        for name, value in ({package: values} if package else values).items():
            if name in hints:
                yield from schema.walk(value, hints[name], name, self.verb, name)
            else:
                yield schema.Unknown(name, None, value)

    def all_settings(self) -> list[schema.Setting]:
        """List the settings of the verb, its parts' by their chosen options."""
        chosen = {group: {self.options.get(group, ""): part} for group, part in self.parts.items()}
        return schema.list_settings(self.verb, chosen)

    def problem_of(self, found: schema.Leaf | schema.Unknown) -> str | None:
        """Word what is wrong with one key or value, without its place; None if nothing is."""
        if isinstance(found, schema.Leaf):
            refusal = refuse(found.key, found.value)
            if refusal is not None or _is_reference(found.value):
                return refusal
            if self.takes_value(found):
                return self._problem_of_choice(found)
            expected = schema.describe_type(hints_of(found.owner)[found.field])
            value = found.value[0] if found.key.endswith("]") else found.value
            return f"{found.key}={_brief(value)}: expected {expected}"
        if (refusal := refuse(found.key, found.value)) is not None:
            return refusal
        group = found.key.partition(".")[0]
        if (option := self.option_with(found.key)) is not None:
            here = self.options.get(group)
            return f"{found.key}: a setting of {group}={option}, but here {group}={here}"
        siblings = list(hints_of(found.owner or self.verb))
        guess = schema.suggest(found.key, siblings, self.all_settings())
        guess = guess or f"; there are {', '.join(siblings)}"
        return f"unknown key {found.key}={_brief(found.value)}{guess}"

    def option_with(self, key: str) -> str | None:
        """Return the option of `key`'s group that has this setting; the chosen one has not."""
        group, _, rest = key.partition(".")
        for option, other in self.other_options.get(group, {}).items():
            if rest in hints_of(other):
                return option
        return None

    def left_out(self, file: ConfFile) -> list[str]:
        """List the keys of an experiment that are settings of an option which was replaced."""
        if file.path.parent.name != "experiment":
            return []
        return [
            found.key
            for found in self.walk(file.values, file.package)
            if isinstance(found, schema.Unknown)
            and found.key.partition(".")[0] in self.replaced
            and self.option_with(found.key) is not None
        ]

    def _problem_of_choice(self, leaf: schema.Leaf) -> str | None:
        group, _, name = leaf.key.partition(".")
        if name == "name" and group in self.parts:
            if self.options.get(group, leaf.value) == leaf.value:
                return None
            return (
                f"{leaf.key}={leaf.value}: expected {self.options[group]}; type "
                f"{group}={leaf.value} to choose another one"
            )
        field = next(one for one in dataclasses.fields(leaf.owner) if one.name == leaf.field)
        facts, hint = facts_of(field), hints_of(leaf.owner)[leaf.field]
        if facts.bounds or takes(facts, hint, leaf.value):
            return None  # numbers are checked with what they are coupled to, in preflight/couplings
        value = leaf.value[0] if leaf.key.endswith("]") else leaf.value
        words = [str(choice) for choice in facts.choices]
        guess = nearest(str(value), words)
        return f"{leaf.key}={_brief(value)}: expected {expected(facts, hint)}{guess}"


def _is_reference(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("${")


def _brief(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_file(file: ConfFile, settings: Settings) -> list[str]:
    """List the problems of a YAML file, each with file:line."""
    # Where any key may stand (model.architecture), the walk below sees no single ones.
    problems = [
        f"{file.where(key)} {refusal}"
        for key in file.lines
        if (refusal := refuse(key, None)) is not None
    ]
    left_out = settings.left_out(file)
    for found in settings.walk(file.values, file.package):
        problem = settings.problem_of(found) if found.key not in left_out else None
        if problem is not None and f"{file.where(found.key)} {problem}" not in problems:
            problems.append(f"{file.where(found.key)} {problem}")
    return problems


def check_given(given: Given, settings: Settings) -> list[str]:
    """List the problems of one override of the command line."""
    problems = [settings.problem_of(found) for found in _walk_given(given, settings)]
    return [f"command line: {problem}" for problem in problems if problem]


def put_word_in_list(given: Given, settings: Settings) -> Given:
    """Read a bare word that was typed for a list of text as a list of it alone."""
    word = given.value
    if not isinstance(word, str) or not word or _is_reference(word):
        return given
    for found in _walk_given(given, settings):
        if isinstance(found, schema.Leaf):
            hint = schema.element_of(hints_of(found.owner)[found.field])
            if hint == list[str]:
                key, _, spelling = given.override.partition("=")
                return Given(given.key, [word], f"{key}=[{spelling}]")
    return given


def _walk_given(given: Given, settings: Settings) -> Iterator[schema.Leaf | schema.Unknown]:
    first, *rest = given.key.split(".")
    value = given.value
    for name in reversed(rest):
        value = {name: value}
    yield from settings.walk({first: value})
