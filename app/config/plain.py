"""Command lines of verbs that have a few settings and compose no model, parsed without Hydra.

Settings are typed as `key=value`; the key of a list may be repeated.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from app.config.dispatch import run_guarded
from app.config.overrides import safety_error
from app.config.schema import docs_of, list_settings
from common.errors import DONE, UserError, nearest
from common.facts import default_of, facts_of, hints_of
from common.installation import verb_command

T = TypeVar("T")
_TRUTH = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}


def run_plain_verb(
    verb: str, schema: type[T], function: Callable[[T], object], words: Sequence[str] | None = None
) -> int:
    """Run a verb from its command line; return the exit code and print at most one error."""
    typed = list(sys.argv[1:] if words is None else words)

    def work() -> int:
        if {"--help", "-h"} & set(typed):
            print(_help_of(verb, schema))
        else:
            function(read_plain(schema, typed))
        return DONE

    return run_guarded(verb, work)


def read_plain(schema: type[T], words: Sequence[str]) -> T:
    """Convert typed words to the fields of `schema`: str, bool, int, or a list of str.

    UserError lists every problem.
    """
    untyped: Any = schema  # type[T] is not hashable to mypy
    fields = {facts_of(field).typed or field.name: field for field in dataclasses.fields(untyped)}
    hints, values, problems = hints_of(untyped), dict[str, Any](), []
    for word in words:
        key, equals, value = word.partition("=")
        field = fields.get(key)
        if not equals or field is None:
            hint = nearest(key, fields) or f"; expected {', '.join(f'{name}=' for name in fields)}"
            problems.append(f"{word}: unknown setting{hint}")
        elif (refusal := safety_error(key, value)) is not None:
            problems.append(refusal)
        elif not value.strip():
            problems.append(f"{key} is empty; is it a variable that is not set?")
        elif (is_truth := hints[field.name] in (bool, bool | None)) and value.lower() not in _TRUTH:
            problems.append(f"{key}={value}: expected true or false")
        elif is_truth:
            values[field.name] = _TRUTH[value.lower()]
        elif hints[field.name] is int and not value.isdecimal():
            problems.append(f"{key}={value}: expected a whole number")
        elif hints[field.name] is int:
            values[field.name] = int(value)
        elif hints[field.name] == list[str]:
            values[field.name] = [*values.get(field.name, []), value]
        elif field.name in values:
            problems.append(f"{key} is given twice: {values[field.name]} and {value}")
        else:
            values[field.name] = value
    missing = [
        key
        for key, field in fields.items()
        if default_of(field) is dataclasses.MISSING and field.name not in values
    ]
    if not problems:
        docs = docs_of(untyped)
        problems = [f"{key}=... is missing: {docs[fields[key].name]}" for key in missing]
    if problems:
        raise UserError(problems)
    return schema(**values)


def _help_of(verb: str, schema: type) -> str:
    """Return the help page of a verb."""
    from app.config.help import describe, page_width, two_columns

    about = inspect.cleandoc(str(schema.__doc__))
    rows = {each.typed_key: describe(each) for each in list_settings(schema)}
    usage = f"usage: {verb_command(verb)} SETTING=VALUE ..."
    return "\n".join([usage, "", about, "", *two_columns(rows, page_width())])
