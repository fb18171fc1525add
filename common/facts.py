"""The facts of a setting, declared at its field: `lr: float = setting(1e-4, gt=0, le=10)`.

The checks, `--help`, docs/settings.md, the JSON schema and the comparison of a resumed run are all
generated from them. Needs nothing but dataclasses.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import operator
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    TypedDict,
    TypeGuard,
    TypeVar,
    get_args,
    get_origin,
    overload,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from typing_extensions import Unpack

ResumeRule = Literal[
    "fixed",  # may not change
    "free",  # may change: the trained weights do not depend on it
    "rounding",  # may change: the same mathematics, computed differently in the last digits
    "content",  # compared by what it resolves to (files, ranks), not by its spelling
    "per_start",  # belongs to one start of the run and is never compared
    "lr",  # this and the following may change with this word in resume_allow
    "schedule",
    "epochs",
    "data",
    "precision",
]
"""whether a resumed run may change a setting"""

Grant = Literal[
    "nothing",  # text that only chooses or names something
    "code",  # code runs
    "write",  # files are written there
    "host",  # a URL is contacted
]
"""what the value of a setting lets the program do; never read back from a folder, but "nothing" """


_T = TypeVar("_T")
_LARGEST = 10**9
"""upper bound of whole numbers that declare none"""
COMPARISONS = {"ge": operator.ge, "gt": operator.gt, "le": operator.le, "lt": operator.lt}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What a field states about its setting besides type, default and docstring."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    choices: tuple[Any, ...] = ()
    """allowed values (as bounds, of each element for a list); with bounds: values besides them"""
    note: str = ""
    """added to an error about the value: what is usual, or what a bound means"""
    resume: ResumeRule | None = None
    """whether a resumed run may change it; None: the rule of the field that holds its dataclass"""
    shown: bool | tuple[str, ...] = False
    """whether the first page of `--help` lists it: of every verb, or of those named"""
    aliases: tuple[str, ...] = ()
    """names in other tools; `name=value` if that name corresponds to one value of this setting"""
    option_aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """other tools' name of a value -> ours; of a group's option, with further overrides to type"""
    instead_of: str = ""
    """the setting of the same group that expresses the same thing differently"""
    typed: str = ""
    """the name to type, if it is a reserved word in Python"""
    is_path: bool = False
    """whether it names a file or folder (or a hub id, or a template), made absolute if it exists"""
    grants: Grant | None = None
    """what a value lets the program do; stated for every text without choices or `is_path`"""

    @property
    def bounds(self) -> dict[str, float]:
        bounds = {name: getattr(self, name) for name in COMPARISONS}
        return {name: bound for name, bound in bounds.items() if bound is not None}


class _Facts(TypedDict, total=False):
    """The keyword arguments of `setting`, which are the fields of `Facts`."""

    ge: float
    gt: float
    le: float
    lt: float
    choices: Collection[Any]
    note: str
    resume: ResumeRule
    shown: bool | tuple[str, ...]
    aliases: tuple[str, ...]
    option_aliases: Mapping[str, str]
    instead_of: str
    typed: str
    is_path: bool
    grants: Grant


@overload
def setting(default: _T, **facts: Unpack[_Facts]) -> _T: ...
@overload
def setting(*, default_factory: Callable[[], _T], **facts: Unpack[_Facts]) -> _T: ...
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
    facts: Facts = field.metadata.get("facts", _NONE)
    return facts


def is_settings(value: object) -> TypeGuard[DataclassInstance]:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


@functools.cache
def hints_of(schema: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields, in order."""
    hints = typing.get_type_hints(schema)
    return {field.name: hints[field.name] for field in dataclasses.fields(schema)}


def is_optional(hint: Any) -> bool:
    """Return whether a field of this type may be null."""
    return type(None) in get_args(hint)


def takes(facts: Facts, hint: Any, value: Any) -> bool:
    """Return whether a value of the right type is a choice or within the bounds."""
    if value is None or value in facts.choices:
        return True
    if isinstance(value, list) and (facts.choices or (facts.bounds and get_origin(hint) is list)):
        element = next(iter(get_args(hint)), hint)
        return all(part is not None and takes(facts, element, part) for part in value)
    if not facts.bounds:
        return not facts.choices
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or (isinstance(value, float) and float not in (hint, *get_args(hint))):
        return False
    return (
        math.isfinite(value)
        and not _is_too_large(facts, value)
        and all(COMPARISONS[name](value, bound) for name, bound in facts.bounds.items())
    )


def _is_too_large(facts: Facts, value: Any) -> bool:
    """Return whether a whole number is above _LARGEST, and its field declares no upper bound."""
    has_upper = bool(facts.bounds.keys() & {"le", "lt"}) or not facts.bounds
    return type(value) is int and not has_upper and value > _LARGEST


def describe_values(facts: Facts, hint: Any) -> str:
    """Describe the allowed values, as in `1 or more, or null`; empty if any of its type is."""
    *first, last = map(str, facts.choices or ("",))
    choices = f"{', '.join(first)} or {last}" if first else last
    if facts.bounds.keys() == {"ge", "le"}:
        bounds = f"from {facts.ge} to {facts.le}"
    else:
        words = {"ge": "{} or more", "gt": "above {}", "le": "at most {}", "lt": "below {}"}
        bounds = ", ".join(words[name].format(bound) for name, bound in facts.bounds.items())
    text = f"{choices}, or a number: {bounds}" if choices and bounds else choices or bounds
    return f"{text}, or null" if text and is_optional(hint) else text


def expected(facts: Facts, hint: Any) -> str:
    """Describe the allowed values for an error message, with the field's note."""
    return f"{describe_values(facts, hint)}{f' ({facts.note})' if facts.note else ''}"


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return a field's default; dataclasses.MISSING if it is required."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def as_typed(value: Any) -> str:
    """Return a value as a user types it; of a section only what differs from the defaults."""
    if dataclasses.is_dataclass(value):
        return as_typed(
            {
                field.name: getattr(value, field.name)
                for field in dataclasses.fields(value)
                if getattr(value, field.name) != default_of(field)
            }
        )
    if isinstance(value, list):
        return f"[{', '.join(map(as_typed, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {as_typed(part)}' for name, part in value.items())}}}"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def check_values(
    config: DataclassInstance, prefix: str = "", *, skip: Collection[str] = ()
) -> list[str]:
    """Return a problem for every value in a settings object that its field does not allow.

    `prefix` is the key of `config` itself; the fields named in `skip` are not checked.
    """
    problems = []
    for key, owner, field, value in leaves_of(config, prefix, skip=skip):
        facts, hint = facts_of(field), hints_of(type(owner))[field.name]
        if not takes(facts, hint, value):
            bound = f", and at most {_LARGEST:,}" if _is_too_large(facts, value) else ""
            problems.append(f"{key}={value}: expected {expected(facts, hint)}{bound}")
    return problems


def leaves_of(
    config: DataclassInstance, prefix: str = "", *, skip: Collection[str] = ()
) -> Iterator[tuple[str, DataclassInstance, dataclasses.Field[Any], Any]]:
    """Yield full key, owner, field and value of each plain setting, at any depth.

    A list of sections is walked element by element, any other list is one value. `prefix` is the
    key of `config` itself; the fields named in `skip` are left out.
    """
    for field in dataclasses.fields(config):
        if field.name in skip:
            continue
        value, key = getattr(config, field.name), f"{prefix}.{field.name}".removeprefix(".")
        parts = value if isinstance(value, list) and value else [value]
        if not dataclasses.is_dataclass(parts[0]):
            yield key, config, field, value
            continue
        for index, part in enumerate(parts):
            yield from leaves_of(part, f"{key}[{index}]" if part is not value else key)
