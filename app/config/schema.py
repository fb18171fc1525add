"""A schema's settings as a flat list: key, default, docstring and facts of each field.

Works on dataclasses and plain values; knows neither Hydra nor any setting by name.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import shlex
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from common.errors import nearest
from common.facts import Facts, ResumeRule, facts_of, hints_of, is_optional


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One setting of a verb; a setting of list elements has a key like `data.datasets[].path`."""

    key: str
    """full key, as Python spells it"""
    owner: type
    field: dataclasses.Field[Any]
    hint: Any
    resume: ResumeRule | None
    """the rule of its field, else of the part that contains it"""
    options: tuple[str, ...] = ()
    """options of its group that have this setting; empty = all of them"""

    @property
    def facts(self) -> Facts:
        return facts_of(self.field)

    @property
    def doc(self) -> str:
        return docs_of(self.owner).get(self.field.name, "")

    @property
    def is_part(self) -> bool:
        """Whether it is a group of settings rather than a value."""
        return _schema_in(self.hint) is not None and not self.is_list

    @property
    def is_list(self) -> bool:
        return typing.get_origin(element_of(self.hint)) is list

    @property
    def typed_key(self) -> str:
        """The full key as a user types it."""
        parent, dot, _ = self.key.rpartition(".")
        return f"{parent}{dot}{self.facts.typed}" if self.facts.typed else self.key


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """One value with its full key, and the dataclass and field that it is for."""

    key: str
    owner: type
    field: str
    value: Any

    @property
    def hint(self) -> Any:
        """The type of its field, of X | None that of X."""
        return element_of(hints_of(self.owner)[self.field])

    @property
    def facts(self) -> Facts:
        fields = dataclasses.fields(self.owner)
        return facts_of(next(each for each in fields if each.name == self.field))


@dataclasses.dataclass(frozen=True, slots=True)
class Unknown:
    """A key that no setting has, and the schema that was searched (None: the verb itself)."""

    key: str
    owner: type | None
    value: Any


@functools.cache
def docs_of(schema: type) -> dict[str, str]:
    """Return the docstring under each field of a dataclass, including its bases."""
    docs: dict[str, str] = {}
    for base in reversed(schema.__mro__):
        if dataclasses.is_dataclass(base):
            docs |= _docs_in(base.__module__).get(base.__name__, {})
    return docs


@functools.cache
def _docs_in(module: str) -> dict[str, dict[str, str]]:
    source = Path(str(sys.modules[module].__file__)).read_text(encoding="utf-8")
    return {
        node.name: {
            field.target.id: " ".join(str(doc.value.value).split())
            for field, doc in zip(node.body, node.body[1:], strict=False)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            if isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant)
        }
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
    }


def element_of(hint: Any) -> Any:
    """Return X of X | None; any other hint unchanged."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        inner = [part for part in typing.get_args(hint) if part is not type(None)]
        return inner[0] if len(inner) == 1 else hint
    return hint


def is_section(hint: Any) -> TypeGuard[type]:
    """Return whether a setting of this type holds settings of its own."""
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def walk(value: Any, hint: Any, key: str, owner: type, field: str) -> Iterator[Leaf | Unknown]:
    """Walk a value along its type; yield each leaf, and each key that does not exist."""
    hint = element_of(hint)
    if is_section(hint) and isinstance(value, dict):
        hints = hints_of(hint)
        for name, part in value.items():
            if name in hints:
                yield from walk(part, hints[name], f"{key}.{name}", hint, name)
            else:
                yield Unknown(f"{key}.{name}", hint, part)
    elif typing.get_origin(hint) is list and isinstance(value, list):
        (inner,) = typing.get_args(hint)
        for index, part in enumerate(value):
            if isinstance(element_of(inner), type) and isinstance(part, dict):
                yield from walk(part, inner, f"{key}[{index}]", owner, field)
            else:
                yield Leaf(f"{key}[{index}]", owner, field, [part])
        if not value:
            yield Leaf(key, owner, field, value)
    else:
        yield Leaf(key, owner, field, value)


def _schema_in(hint: Any) -> type | None:
    """Return the dataclass of a field that holds one or a list of them; None for plain values."""
    inner = element_of(hint)
    if typing.get_origin(inner) is list:
        (inner,) = typing.get_args(inner)
    return inner if is_section(inner) else None


def list_settings(
    schema: type, parts: Mapping[str, Mapping[str, type]] | None = None
) -> list[Setting]:
    """List every setting of a verb, each part before its own settings.

    `parts`: group -> option -> schema, for groups whose settings depend on the option.
    """
    settings: list[Setting] = []
    for field in dataclasses.fields(schema):
        options = (parts or {}).get(field.name)
        (part, *inner) = _settings_of_field(schema, field, "", None)
        settings.append(part)
        if options is None:
            settings += inner
        else:
            settings += _merge_options(field.name, options, part.resume)
    return settings


def _merge_options(
    group: str, options: Mapping[str, type], resume: ResumeRule | None
) -> list[Setting]:
    """List the settings of all options of a group; a setting that several options share once."""
    merged: dict[tuple[str, str], Setting] = {}
    for option, schema in options.items():
        for setting in _settings_in(schema, f"{group}.", resume):
            known = merged.get((setting.key, setting.doc), setting)
            merged[setting.key, setting.doc] = dataclasses.replace(
                known, options=(*known.options, option)
            )
    return [
        dataclasses.replace(each, options=()) if len(each.options) == len(options) else each
        for each in merged.values()
    ]


def _settings_in(schema: type, prefix: str, resume: ResumeRule | None) -> Iterator[Setting]:
    for field in dataclasses.fields(schema):
        yield from _settings_of_field(schema, field, prefix, resume)


def _settings_of_field(
    owner: type, field: dataclasses.Field[Any], prefix: str, resume: ResumeRule | None
) -> Iterator[Setting]:
    hint, key = hints_of(owner)[field.name], f"{prefix}{field.name}"
    resume = facts_of(field).resume or resume
    setting = Setting(key=key, owner=owner, field=field, hint=hint, resume=resume)
    yield setting
    if (inner := _schema_in(hint)) is not None:
        yield from _settings_in(inner, f"{key}[]." if setting.is_list else f"{key}.", resume)


def aliases_of(settings: Iterable[Setting]) -> dict[str, str]:
    """Return names that other tools use for settings: their name -> our key, or `key=value`."""
    aliases: dict[str, str] = {}
    for setting in settings:
        for alias in (*setting.facts.aliases, *filter(None, [setting.facts.typed])):
            name, equals, value = alias.partition("=")
            aliases.setdefault(name, f"{setting.typed_key}{equals}{value}")
    return aliases


def suggest_by_name(name: str, value: str, settings: list[Setting]) -> str:
    """Return a hint at the setting of this name, here or in another tool; or nothing.

    `value`: what was typed for it; decides which option of a group is named.
    """
    if (ours := aliases_of(settings).get(name)) is not None:
        known = {setting.typed_key: setting.facts.option_aliases for setting in settings}
        if option := known.get(ours, {}).get(value.lower()):
            return f"; type {ours}={option}"
        if "=" in ours:
            return f"; type {ours}"
        return f"; type {shlex.quote(f'{ours}={value}')}" if value else f"; did you mean {ours}?"
    same_name = [each.key for each in settings if each.key.rpartition(".")[2] == name]
    return f"; did you mean {same_name[0]}?" if same_name else ""


def suggest(key: str, siblings: list[str], settings: list[Setting], value: str = "") -> str:
    """Return a hint at the intended key of an unknown one: `; did you mean X?`, or nothing."""
    parent, _, leaf = key.rpartition(".")
    if leaf in aliases_of(settings):
        return suggest_by_name(leaf, value, settings)
    if hint := nearest(leaf, siblings):
        return hint.replace(
            "did you mean ", f"did you mean {parent}." if parent else "did you mean "
        )
    if hint := suggest_by_name(leaf, value, settings):
        return hint
    all_keys = [setting.key for setting in settings]
    return nearest(key, [known for known in all_keys if not key.startswith(f"{known}.")])


def describe_type(hint: Any) -> str:
    """Describe the values of a type in words."""
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    inner = element_of(hint)
    if inner in words:
        text = words[inner]
    elif isinstance(inner, types.UnionType):
        text = " or ".join(describe_type(part) for part in typing.get_args(inner))
    elif typing.get_origin(inner) is list:
        element = element_of(typing.get_args(inner)[0])
        text = f"a list of {describe_type(element)}"
    elif typing.get_origin(inner) is dict:
        text = "{name: value, ...}"
    elif is_section(inner):
        text = f"{{{', '.join(hints_of(inner))}}}"
    else:
        text = str(inner)
    return f"{text} or null" if is_optional(hint) else text
