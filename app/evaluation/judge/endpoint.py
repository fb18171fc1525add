"""Client of an OpenAI-compatible endpoint, with a rate limit, retries and a cache.

Replies are cached on disk by their request, so the same request is never paid for twice.
"""

from __future__ import annotations

import contextlib
import email.utils
import hashlib
import http.client
import json
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from app.evaluation.judge.questions import JUDGE_KEY, JudgeConfig, Message
from app.process.launch import is_loopback
from app.training.checkpoint.documents import COUNT, FLAG, TEXT, Keys
from app.training.run_documents import find_problem
from common.errors import UserError
from common.files import write_atomically
from common.redaction import redact
from common.text import printable
from common.untrusted import LimitError, call_within

FIRST_WAIT, _MAX_WAIT = 1.0, 60.0
"""shortest and longest delay before a retry, in seconds"""
_MAX_DIGITS = 15
"""digits that are read of a number; more tokens are not counted"""
_MAX_BYTES = 2**22
"""largest response in bytes"""
_PERMANENT_ERRORS = (400, 401, 403, 404, 405, 413, 422)
"""status codes for which a retry is useless"""
_REPLY = Keys({"text": TEXT, "read_tokens": COUNT, "written_tokens": COUNT, "is_cached": FLAG})
"""a file of the cache; one that is incomplete is requested again"""


class JudgeError(OSError):
    """The judge could not be reached or its replies could not be used."""


@dataclass(frozen=True, slots=True)
class JudgeReply:
    """A judge's reply, and the number of tokens that were read and written for it."""

    text: str
    read_tokens: int = 0
    written_tokens: int = 0
    is_cached: bool = False


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect, which could send the key to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Endpoint:
    """One judge model at one endpoint; safe to use from several threads."""

    def __init__(self, config: JudgeConfig, key: str | None, cache: Path) -> None:
        self._config, self._key, self._cache = config, key, cache
        self._url = f"{str(config.url).rstrip('/')}/chat/completions"
        handlers: list[Any] = [_NoRedirects]
        if is_loopback(urlsplit(self._url).hostname or ""):
            handlers.append(urllib.request.ProxyHandler({}))  # local requests bypass a proxy
        self._opener = urllib.request.build_opener(*handlers)
        self._lock = threading.Lock()
        self._request_locks: dict[Path, threading.Lock] = {}
        self._next_start = 0.0
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Send no more requests; requests that wait for a retry or the rate limit fail at once."""
        self._stopped.set()

    def complete(self, messages: Sequence[Message]) -> JudgeReply:
        """Return the judge's reply to a conversation, from the cache if it is there.

        Raises UserError if the endpoint rejects the request, JudgeError if all retries fail.
        """
        body = self._body(messages)
        file = self._cache_file(body)
        with self._lock:
            request_lock = self._request_locks.setdefault(file, threading.Lock())
        with request_lock:  # equal answers of two models are judged once
            cached, problem = find_problem(file, _REPLY)
            if problem is None:
                return replace(JudgeReply(**cached), is_cached=True)
            reply = self._request_with_retries(json.dumps(body).encode())
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, json.dumps(asdict(reply), ensure_ascii=False) + "\n")
            return reply

    def forget(self, messages: Sequence[Message]) -> None:
        self._cache_file(self._body(messages)).unlink(missing_ok=True)

    def _body(self, messages: Sequence[Message]) -> dict[str, Any]:
        parameters = {
            name: value for name, value in self._config.parameters.items() if value is not None
        }
        return {"model": self._config.model, "messages": list(messages), **parameters}

    def _cache_file(self, body: Mapping[str, Any]) -> Path:
        key = json.dumps([self._url, body], sort_keys=True)
        return self._cache / f"{hashlib.sha256(key.encode()).hexdigest()}.json"

    def _request_with_retries(self, body: bytes) -> JudgeReply:
        wait, problem = FIRST_WAIT, ""
        for number in range(self._config.max_retries + 1):
            if number:
                self._pause(wait)
            self._wait_for_rate_limit()
            try:
                return self._request(body)
            except _TemporaryFailure as failure:
                problem = str(failure)
                if failure.wait is not None and failure.wait > _MAX_WAIT:
                    raise JudgeError(
                        self._message(f"{problem} with a requested delay of {failure.wait:.0f} s")
                    ) from None
                # Jitter keeps the threads from retrying at the same time.
                backoff = FIRST_WAIT * 2**number * random.uniform(1, 1.25)
                wait = min(_MAX_WAIT, backoff) if failure.wait is None else failure.wait
        tries = self._config.max_retries + 1
        raise JudgeError(self._message(f"{problem} ({tries} {'try' if tries == 1 else 'tries'})"))

    def _request(self, body: bytes) -> JudgeReply:
        headers = {"content-type": "application/json", "user-agent": "loft"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self._url, body, headers)
        limit = self._config.timeout_seconds
        try:
            # The timeout of a socket begins again with every byte, as of dripping headers.
            return call_within(limit, lambda: self._send(request))
        except (LimitError, TimeoutError) as error:
            raise _TemporaryFailure(f"no answer within {limit:g} s") from error
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise _TemporaryFailure(f"no answer within {limit:g} s") from error
            raise _TemporaryFailure(f"cannot be reached: {error.reason}") from error
        except (OSError, http.client.HTTPException) as error:
            raise _TemporaryFailure(
                f"the connection broke off: {error or type(error).__name__}"
            ) from error

    def _send(self, request: urllib.request.Request) -> JudgeReply:
        try:
            with self._opener.open(request, timeout=self._config.timeout_seconds) as response:
                data = _read_response(response)
                if response.length:
                    raise _TemporaryFailure(
                        f"the connection broke off {response.length} bytes before the end"
                    )
                return _parse_reply(data)
        except urllib.error.HTTPError as error:
            self._raise_for_status(error)

    def _raise_for_status(self, error: urllib.error.HTTPError) -> NoReturn:
        text = ""
        with contextlib.suppress(OSError, http.client.HTTPException, _TemporaryFailure), error:
            text = _read_response(error).decode("utf-8", "replace")
        with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):
            text = str(json.loads(text)["error"]["message"])
        text = _without_surrogates(text.strip()[:200])
        problem = f"status {error.code}{': ' * bool(text)}{text}"
        if error.code in (401, 403):
            raise UserError(
                self._message(f"{problem}; set the key: {JUDGE_KEY}=... in the environment")
            )
        if error.code in _PERMANENT_ERRORS or 300 <= error.code < 400:
            fix = "evaluation.judge.url, evaluation.judge.model or evaluation.judge.parameters"
            raise UserError(self._message(f"{problem}; type another {fix}"))
        raise _TemporaryFailure(problem, _retry_after(error.headers.get("retry-after")))

    def _message(self, problem: str) -> str:
        if self._key:
            problem = problem.replace(self._key, "<redacted>")
        return f"judge {self._config.model} at {self._config.url}: {printable(redact(problem))}"

    def _wait_for_rate_limit(self) -> None:
        if self._config.requests_per_minute is None:
            return
        with self._lock:
            now = time.monotonic()
            start = max(now, self._next_start)
            self._next_start = start + 60 / self._config.requests_per_minute
        self._pause(start - now)

    def _pause(self, seconds: float) -> None:
        if self._stopped.wait(max(0.0, seconds)):
            raise JudgeError(self._message("no more requests are sent"))


class _TemporaryFailure(Exception):
    """A failure worth a retry; `wait` is the delay in seconds requested by the endpoint, if any."""

    def __init__(self, problem: str, wait: float | None = None) -> None:
        self.wait = wait
        super().__init__(problem)


def _read_response(response: Any) -> bytes:
    data: bytes = response.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise _TemporaryFailure(f"the answer is larger than {_MAX_BYTES // 2**20} MiB")
    return data


def _parse_reply(data: bytes) -> JudgeReply:
    try:
        answer = json.loads(data, parse_int=lambda digits: int(digits[: _MAX_DIGITS + 1]))
        text = answer["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        text = None
    if not isinstance(text, str):
        start = data[:80].decode("utf-8", "replace")
        raise _TemporaryFailure(f"the answer is not a chat completion: {start!r}")
    usage = answer.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    read, written = (
        count if type(count := usage.get(name)) is int and 0 <= count < 10**_MAX_DIGITS else 0
        for name in ("prompt_tokens", "completion_tokens")
    )
    return JudgeReply(_without_surrogates(text), read, written)


def _without_surrogates(text: str) -> str:
    """Replace halves of surrogate pairs, which no file can hold, by question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _retry_after(value: str | None) -> float | None:
    if value is None:
        return None
    with contextlib.suppress(ValueError):
        return max(0.0, float(value))
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    return None
