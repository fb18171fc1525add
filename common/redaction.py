"""The redaction of secrets.

The only place that decides what a secret looks like. It redacts too much of a URL's query rather
than too little: what is redacted can be typed again, what was written to disk stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
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
