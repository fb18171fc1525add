"""Verbs with a few settings of their own and no model to compose: read without Hydra.

Words are `key=value` as everywhere; a list's key may be typed several times.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from app.config.overrides import refuse
from app.config.schema import default_of, docs_of
from app.process.errors import DONE, UserError, nearest
from app.process.reporting import report
from data_modules import facts_of, hints_of

T = TypeVar("T")
TRUTH = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}


def run_plain_verb(
    verb: str, schema: type[T], function: Callable[[T], object], words: Sequence[str] | None = None
) -> int:
    """Run a verb from its command line; returns the exit code, prints at most one error."""
    typed = list(sys.argv[1:] if words is None else words)
    try:
        if {"--help", "-h"} & set(typed):
            print(help_of(verb, schema))
            return DONE
        function(read_plain(schema, typed))
        return DONE
    except BaseException as error:  # noqa: BLE001  last guard
        return report(error)


def read_plain(schema: type[T], words: Sequence[str]) -> T:
    """Give typed words the types of `schema`'s fields: text, true or false, a number, or texts.

    UserError with every problem.
    """
    fields = {facts_of(field).typed or field.name: field for field in _fields(schema)}
    kind: Any = schema
    hints, values, problems = hints_of(kind), dict[str, Any](), []
    for word in words:
        key, equals, value = word.partition("=")
        field = fields.get(key)
        if not equals or field is None:
            hint = nearest(key, fields) or f"; it takes {', '.join(f'{one}=' for one in fields)}"
            problems.append(f"{word}: unknown word{hint}")
        elif (refusal := refuse(key, value)) is not None:
            problems.append(refusal)
        elif not value.strip():
            problems.append(f"{key} is empty; is it a variable that is not set?")
        elif hints[field.name] is bool and value.lower() not in TRUTH:
            problems.append(f"{key}={value}: expected true or false")
        elif hints[field.name] is bool:
            values[field.name] = TRUTH[value.lower()]
        elif hints[field.name] is int and not value.isdecimal():
            problems.append(f"{key}={value}: expected a whole number")
        elif hints[field.name] is int:
            values[field.name] = int(value)
        elif hints[field.name] == list[str]:
            values[field.name] = [*values.get(field.name, []), value]
        elif field.name in values:
            problems.append(f"{key} is typed twice: {values[field.name]} and {value}")
        else:
            values[field.name] = value
    missing = [
        key
        for key, field in fields.items()
        if default_of(field) is dataclasses.MISSING and field.name not in values
    ]
    if not problems:
        problems = [f"{key}=... is missing: {_doc(schema, fields[key])}" for key in missing]
    if problems:
        raise UserError(problems)
    return schema(**values)


def help_of(verb: str, schema: type) -> str:
    """Return the help page of a verb."""
    about = inspect.cleandoc(str(schema.__doc__))
    lines = [f"usage: python -m app.{verb} SETTING=VALUE ...", "", about, ""]
    for field in _fields(schema):
        default = default_of(field)
        key = facts_of(field).typed or field.name
        empty = default in (dataclasses.MISSING, None) or default == []
        shown = str(default).lower() if isinstance(default, bool) else default
        lines.append(f"  {key}{'' if empty else f'={shown}'}")
        indent = " " * 6
        doc = _doc(schema, field)
        lines += textwrap.wrap(doc, 90, initial_indent=indent, subsequent_indent=indent)
    return "\n".join(lines)


def _fields(schema: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(schema)


def _doc(schema: type, field: dataclasses.Field[Any]) -> str:
    return docs_of(schema).get(field.name, "")
