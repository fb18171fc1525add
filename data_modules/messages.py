"""Errors of the data pipeline, and the redaction of secrets and control characters.

The only place that decides what a secret looks like. It redacts too much of a URL's query rather
than too little: what is redacted can be typed again, what was written to disk stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

REDACTED = "<redacted>"
"""replaces a secret"""
_SECRET_NAMES = (
    r"[\w.~%-]*(?:token|secret|passw|pwd|signature|credential|session|jwt|auth(?!or)"
    r"|api[_-]?key|access[_-]?key|subscription[_-]?key|key[_-]?pair|accessid)[\w.~%-]*"
    r"|sig|sas|hmac|key|code|policy"
)
_VALUE = r"[^\s&#'\"<>]*[^\s&#'\"<>)}\],.;:]"
# Repetitions are bounded, or matching could take quadratic time.
# A URL that went through pathlib has one slash, as in http:/user:word@host.
_USER_INFO = re.compile(
    r"(?:(?<=://)|(?<=[A-Za-z0-9]{2}:/)(?!/))(?:[^/\s?#]*|[^/\s:@]{0,200}:(?!\d+/)[^\s@?#]{0,200})@"
)
_PARAMETER = re.compile(rf"([?&;#](?:{_SECRET_NAMES})=){_VALUE}", re.IGNORECASE)
_LONG_PARAMETER = re.compile(r"([?&;#][\w.~%-]+=)(?=[^\s&#'\"<>]{20})" + _VALUE)
"""a parameter of any name whose value is as long as a secret"""
_URL = re.compile(r"(?<![\w+.-])[A-Za-z][\w+.-]+:/\S+")
_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])(?:gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|xox[a-z]-[A-Za-z0-9-]{8,}|xapp-[A-Za-z0-9-]{8,}|hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}"
    r"|npm_[A-Za-z0-9]{30,}|AIza[\w-]{30,}|(?:AKIA|ASIA)[A-Z0-9]{16}"
    r"|eyJ[\w-]{8,400}\.[\w-]{8,4000}\.[\w-]*)"
)
_AUTHORIZATION = re.compile(
    r"(\bauthorization['\"]?\s*[:=]\s*['\"]?(?:\w+\s+)?|\bbearer\s+(?=\S*\d))"
    r"[A-Za-z0-9._~+/=-]{8,}",
    re.IGNORECASE,
)
_PRIVATE_KEY = re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(?=-----END|\Z)", re.DOTALL)
MAX_PROBLEMS = 20
MAX_SHOWN = 80
MAX_LISTED = 20


def redact(text: str) -> str:
    """Return `text` with every recognizable secret replaced by `<redacted>`."""
    if ":/" in text:
        text = _USER_INFO.sub(f"{REDACTED}@", text)
    if "=" in text:
        text = _PARAMETER.sub(rf"\1{REDACTED}", text)
        text = _URL.sub(lambda url: _LONG_PARAMETER.sub(rf"\1{REDACTED}", url[0]), text)
    text = _AUTHORIZATION.sub(rf"\1{REDACTED}", text)
    text = _PRIVATE_KEY.sub(rf"\1{REDACTED}", text)
    return _TOKEN.sub(REDACTED, text)


def redacted(value: Any) -> Any:
    """Return a copy of JSON-like nested values with all strings redacted."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {redacted(key): redacted(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [redacted(part) for part in value]
    return value


def holds_token(text: str) -> bool:
    """Return whether `text` holds a token outside a URL (some URLs need theirs)."""
    return _TOKEN.search(_URL.sub("", text)) is not None


def redacted_keys(value: Any, key: str = "") -> Iterator[str]:
    """Yield the full keys of nested values in which a secret was redacted."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from redacted_keys(part, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from redacted_keys(part, f"{key}[{index}]")
    elif isinstance(value, str) and REDACTED in value:
        yield key


def reason_of(error: Exception) -> str:
    """Return a library's error message in one line."""
    strerror = error.strerror if isinstance(error, OSError) else None
    message = strerror or next(iter(str(error).splitlines()), "") or type(error).__name__
    # A library may quote an address with its password or token.
    return redact(message)


def unreadable(file: object, error: Exception) -> str:
    """Return the message that a file cannot be read, and why."""
    return f"{file}: cannot be read: {reason_of(error)}"


def printable(text: str, *, keep: str = "") -> str:
    """Return `text` with its control characters escaped: data must not control a terminal.

    Characters in `keep` stay, such as the line ends of a message of several lines.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def percent(share: float, digits: int = 1, sign: str = "") -> str:
    """Return a share as text: 12.3 %; `sign="+"` also writes the sign of a positive one."""
    return formatted(share, f"{sign}.{digits}%")


def formatted(value: float, spec: str) -> str:
    """Return a number by a format spec; for percentages as `percent` does."""
    return format(value, spec).replace("%", " %")


def shown(text: str) -> str:
    """Return at most 80 printable characters of `text`, to quote in a message."""
    return printable(text[:MAX_SHOWN])[:MAX_SHOWN]


def listed(names: Iterable[object]) -> str:
    """Format a list of names for a message: the first 20, at most 80 characters each."""
    names = list(names)
    first = [str(name)[:MAX_SHOWN] for name in names[:MAX_LISTED]]
    more = len(names) - len(first)
    return f"{first}" if not more else f"[{', '.join(map(repr, first))}, and {more:,} more]"


class DataError(ValueError):
    """What is wrong with the data: all problems of one phase, a line each."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        problems = [problems] if isinstance(problems, str) else problems
        self.problems = [printable(redact(problem)) for problem in problems]
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[DataError], tuple[list[str]]]:
        return type(self), (self.problems,)


class RemoteError(DataError):
    """A server could not be reached, was too slow or disconnected; the data is not at fault."""


class DiskError(DataError):
    """The disk of the cache is full; the data is not at fault."""


class Problems:
    """Collect problems: at most MAX_PROBLEMS lines, the last of which counts the rest."""

    def __init__(self) -> None:
        self._kept: list[str] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, problem: str) -> None:
        """Keep `problem`, or only count it if there are MAX_PROBLEMS already."""
        self._count += 1
        if len(self._kept) < MAX_PROBLEMS:
            self._kept.append(problem)

    def lines(self) -> list[str]:
        """Return the lines to print."""
        if self._count <= MAX_PROBLEMS:
            return list(self._kept)
        hidden = self._count - MAX_PROBLEMS + 1
        return [*self._kept[:-1], f"... and {hidden:,} more like these"]

    def raise_if_any(self) -> None:
        """Raise DataError if there is a problem."""
        if self._count:
            raise DataError(self.lines())


@dataclass(frozen=True, slots=True)
class Origin:
    """The place of a row in its file.

    `line` is the row's first line, counted from 1; the row's number in parquet files and in JSON
    arrays on one line.
    """

    file: str
    line: int

    def __str__(self) -> str:
        return f"{printable(self.file)}:{self.line}"
