"""Check every key and value that was given against the schemas: what is wrong with each, in words.

Where it came from is looked up in `sources`. Only names, types and choices are
checked here; numbers and what does not go together in preflight/couplings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from app.config import schema
from app.config.overrides import refuse
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

    def walk(self, values: dict[str, Any]) -> Iterator[schema.Leaf | schema.Unknown]:
        """Yield each leaf and each unknown key of `values`."""
        hints = hints_of(self.verb) | self.parts
        for name, value in values.items():
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
