"""Word what is wrong with the data, and keep secrets and control characters out of it.

The one place that decides what a secret looks like. It hides too much of a URL's query rather than
too little: what is hidden can be typed again, what is written stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

REDACTED = "<redacted>"
"""stands where a secret stood"""
_SECRET_NAMES = (
    r"[\w.~%-]*(?:token|secret|passw|pwd|signature|credential|session|jwt|auth(?!or)"
    r"|api[_-]?key|access[_-]?key|subscription[_-]?key|key[_-]?pair|accessid)[\w.~%-]*"
    r"|sig|sas|hmac|key|code|policy"
)
_VALUE = r"[^\s&#'\"<>]*[^\s&#'\"<>)}\],.;:]"
# Lengths are bounded where a text of the right letters would else take the square of its length.
# A path made of a URL has one slash, as in http:/user:word@host.
_USER_INFO = re.compile(
    r"(?:(?<=://)|(?<=[A-Za-z0-9]{2}:/)(?!/))(?:[^/\s?#]*|[^/\s:@]{0,200}:(?!\d+/)[^\s@?#]{0,200})@"
)
_PARAMETER = re.compile(rf"([?&;#](?:{_SECRET_NAMES})=){_VALUE}", re.IGNORECASE)
_LONG_PARAMETER = re.compile(r"([?&;#][\w.~%-]+=)(?=[^\s&#'\"<>]{20})" + _VALUE)
"""a name that is not known to be of a secret, and a value as long as one"""
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
    """Return `text` with `<redacted>` in place of each secret that is known by its form."""
    if ":/" in text:
        text = _USER_INFO.sub(f"{REDACTED}@", text)
    if "=" in text:
        text = _PARAMETER.sub(rf"\1{REDACTED}", text)
        text = _URL.sub(lambda url: _LONG_PARAMETER.sub(rf"\1{REDACTED}", url[0]), text)
    text = _AUTHORIZATION.sub(rf"\1{REDACTED}", text)
    text = _PRIVATE_KEY.sub(rf"\1{REDACTED}", text)
    return _TOKEN.sub(REDACTED, text)


def redacted(value: Any) -> Any:
    """Return a copy of plain nested values, as JSON has them, whose texts are redacted."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {redacted(key): redacted(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [redacted(part) for part in value]
    return value


def holds_token(text: str) -> bool:
    """Say whether a token stands in `text` outside of a URL, where some have to be typed."""
    return _TOKEN.search(_URL.sub("", text)) is not None


def redacted_keys(value: Any, key: str = "") -> Iterator[str]:
    """Yield the full keys of plain nested values from which a secret was left out."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from redacted_keys(part, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from redacted_keys(part, f"{key}[{index}]")
    elif isinstance(value, str) and REDACTED in value:
        yield key


def reason_of(error: Exception) -> str:
    """Return the message of a library's error in one line."""
    strerror = error.strerror if isinstance(error, OSError) else None
    message = strerror or next(iter(str(error).splitlines()), "") or type(error).__name__
    # A library may quote an address, with the password or the token in it.
    return redact(message)


def unreadable(file: object, error: Exception) -> str:
    """Say that a file cannot be read, and why."""
    return f"{file}: cannot be read: {reason_of(error)}"


def printable(text: str, *, keep: str = "") -> str:
    """Return `text` with its control characters escaped: a file must not steer a terminal.

    Those of `keep` stay, such as the line ends of a message of several lines.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def shown(text: str) -> str:
    """Return at most 80 characters of a file's text, as a message may quote it."""
    return printable(text[:MAX_SHOWN])[:MAX_SHOWN]


def listed(names: Iterable[object]) -> str:
    """Return names as a message quotes a list of them: the first 20, at most 80 characters each."""
    every = list(names)
    found = [str(name)[:MAX_SHOWN] for name in every[:MAX_LISTED]]
    more = len(every) - len(found)
    return f"{found}" if not more else f"[{', '.join(map(repr, found))}, and {more:,} more]"


class DataError(ValueError):
    """Say what is wrong with the data, all problems of one phase together, a line each."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        problems = [problems] if isinstance(problems, str) else problems
        self.problems = [printable(redact(problem)) for problem in problems]
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[DataError], tuple[list[str]]]:
        return type(self), (self.problems,)


class RemoteError(DataError):
    """Say that a server could not be reached, was too slow or broke off: no fault of the data."""


class Problems:
    """Collect problems: at most MAX_PROBLEMS lines, the last one says how many are left out."""

    def __init__(self) -> None:
        self._kept: list[str] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, problem: str) -> None:
        """Keep `problem`, or only count it when there are MAX_PROBLEMS already."""
        self._count += 1
        if len(self._kept) < MAX_PROBLEMS:
            self._kept.append(problem)

    def lines(self) -> list[str]:
        """Return the problems kept, or all but one of them and how many more there are."""
        if self._count <= MAX_PROBLEMS:
            return list(self._kept)
        hidden = self._count - MAX_PROBLEMS + 1
        return [*self._kept[:-1], f"... and {hidden:,} more like these"]

    def raise_if_any(self) -> None:
        """Raise DataError when there is a problem."""
        if self._count:
            raise DataError(self.lines())


@dataclass(frozen=True, slots=True)
class Origin:
    """Name the place that a row comes from, counted from 1.

    `line` is the row's first line; its number in parquet files and in JSON arrays on one line.
    """

    file: str
    line: int

    def __str__(self) -> str:
        return f"{printable(self.file)}:{self.line}"
