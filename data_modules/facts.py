"""The facts of a setting, stated at its field: `lr: float = setting(1e-4, gt=0, le=10)`.

The checks, `--help`, docs/settings.md, the JSON schema and what a resumed run may change are all
made from them. Needs nothing but dataclasses.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, get_args, overload

if TYPE_CHECKING:
    from typing_extensions import Unpack

ResumeRule = Literal[
    "fixed",  # another value is another run
    "free",  # nothing that is learned depends on it
    "rounding",  # the same mathematics computed another way: the last digits may differ
    "content",  # compared by what it leads to (files, ranks), not by how it is written
    "per_start",  # of one start of the run: never compared
    "trust",  # lets code run that came with files: never taken from a run's own files
    "lr",  # the others may change with that word in resume_allow
    "schedule",
    "epochs",
    "data",
    "precision",
]
"""whether a resumed run may have another value of a setting"""


T = TypeVar("T")
COMPARISONS = {"ge": operator.ge, "gt": operator.gt, "le": operator.le, "lt": operator.lt}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What a field knows of its setting besides type, default and docstring."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    choices: tuple[Any, ...] = ()
    """the values it takes; of a list, those of its elements. Beside bounds: what else it takes"""
    note: str = ""
    """what an error about its value adds: what is usual, or what a bound means"""
    resume: ResumeRule | None = None
    """None: that of the field which holds this one's dataclass"""
    shown: bool | tuple[str, ...] = False
    """whether the first page of `--help` has it: of every verb, or of those named"""
    aliases: tuple[str, ...] = ()
    """names in other tools; `name=value` where the other tool's name means one value of ours"""
    options_elsewhere: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """what other tools call an option of this group -> our option, and what is typed beside it"""
    instead_of: str = ""
    """the setting of the same group that says the same thing another way"""
    typed: str = ""
    """how its name is typed, where Python keeps that word for itself"""

    @property
    def bounds(self) -> dict[str, float]:
        """The bounds that are stated, by name."""
        stated = {name: getattr(self, name) for name in COMPARISONS}
        return {name: bound for name, bound in stated.items() if bound is not None}


class _Facts(TypedDict, total=False):
    """The arguments of `setting`: those of `Facts`."""

    ge: float
    gt: float
    le: float
    lt: float
    choices: Collection[Any]
    note: str
    resume: ResumeRule
    shown: bool | tuple[str, ...]
    aliases: tuple[str, ...]
    options_elsewhere: Mapping[str, str]
    instead_of: str
    typed: str


@overload
def setting(default: T, **facts: Unpack[_Facts]) -> T: ...
@overload
def setting(*, default_factory: Callable[[], T], **facts: Unpack[_Facts]) -> T: ...
@overload
def setting(**facts: Unpack[_Facts]) -> Any: ...
def setting(
    default: Any = dataclasses.MISSING, *, default_factory: Any = dataclasses.MISSING, **facts: Any
) -> Any:
    """Declare a dataclass field with its facts (see `Facts`); without a default it is required."""
    known = Facts(**facts | {"choices": tuple(facts.get("choices", ()))})
    if default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=default_factory, metadata={"facts": known})
    return dataclasses.field(default=default, metadata={"facts": known})


_NONE = Facts()


def facts_of(field: dataclasses.Field[Any]) -> Facts:
    """Return the facts that were stated at a field."""
    facts: Facts = field.metadata.get("facts", _NONE)
    return facts


@functools.cache
def hints_of(schema: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields, in order."""
    hints = typing.get_type_hints(schema)
    return {field.name: hints[field.name] for field in dataclasses.fields(schema)}


def is_optional(hint: Any) -> bool:
    """Return whether a field of this type may be null."""
    return type(None) in get_args(hint)


def takes(facts: Facts, hint: Any, value: Any) -> bool:
    """Return whether a value of the right type is one of the choices, or within the bounds."""
    if value is None or value in facts.choices:
        return True
    if isinstance(value, list) and facts.choices:
        return all(part in facts.choices for part in value)
    if not facts.bounds:
        return not facts.choices
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or (isinstance(value, float) and float not in (hint, *get_args(hint))):
        return False
    return math.isfinite(value) and all(
        COMPARISONS[name](value, bound) for name, bound in facts.bounds.items()
    )


def describe_values(facts: Facts, hint: Any) -> str:
    """Word the values a setting takes: `1 or more, or null`; empty where its type says all."""
    *most, last = map(str, facts.choices or ("",))
    words = f"{', '.join(most)} or {last}" if most else last
    bounds = _describe_bounds(facts.bounds)
    text = f"{words}, or a number: {bounds}" if words and bounds else words or bounds
    return f"{text}, or null" if text and is_optional(hint) else text


def _describe_bounds(bounds: dict[str, float]) -> str:
    if bounds.keys() == {"ge", "le"}:
        return f"from {bounds['ge']} to {bounds['le']}"
    words = {"ge": "{} or more", "gt": "above {}", "le": "at most {}", "lt": "below {}"}
    return ", ".join(words[name].format(bound) for name, bound in bounds.items())


def expected(facts: Facts, hint: Any) -> str:
    """Word what an error about a setting's value says: its values, and what is usual."""
    return f"{describe_values(facts, hint)}{f' ({facts.note})' if facts.note else ''}"


def check_values(config: Any, prefix: str = "", *, skip: Collection[str] = ()) -> list[str]:
    """List every value in a settings object that its field does not take, with its full key.

    `prefix` is the key of `config` itself; the fields named in `skip` are left out.
    """
    return list(_problems(config, prefix, skip))


def _problems(config: Any, prefix: str, skip: Collection[str] = ()) -> Iterator[str]:
    schema: type = type(config)
    hints = hints_of(schema)
    for field in dataclasses.fields(config):
        if field.name in skip:
            continue
        key = f"{prefix}.{field.name}" if prefix else field.name
        value, facts = getattr(config, field.name), facts_of(field)
        if dataclasses.is_dataclass(value):
            yield from _problems(value, key)
        elif isinstance(value, list) and value and dataclasses.is_dataclass(value[0]):
            for index, part in enumerate(value):
                yield from _problems(part, f"{key}[{index}]")
        elif not takes(facts, hints[field.name], value):
            yield f"{key}={value}: expected {expected(facts, hints[field.name])}"
