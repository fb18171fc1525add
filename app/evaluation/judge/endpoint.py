"""Ask an OpenAI-compatible endpoint: within a rate, with retries, and each question once.

Answers are kept on disk by their request: the same question is never paid for twice.
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

from app.evaluation.judge.settings import KEY_VARIABLE, JudgeConfig
from app.process.errors import UserError
from app.process.files import write_whole
from app.process.launch import is_loopback
from data_modules import printable, redact

FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0
"""seconds before a request is sent again"""
MAX_BYTES = 2**22
"""largest answer that is read"""
REFUSALS = (400, 401, 403, 404, 405, 413, 422)
"""statuses that another try would not change"""
Message = dict[str, str]


class JudgeError(OSError):
    """The judge could not be asked: no fault of the answers that it should have judged."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a judge has said, and the tokens that it took."""

    text: str
    read_tokens: int = 0
    written_tokens: int = 0
    is_cached: bool = False


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would take the key to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Endpoint:
    """One judge; several threads may ask it at a time."""

    def __init__(self, config: JudgeConfig, key: str | None, cache: Path) -> None:
        self._config, self._key, self._cache = config, key, cache
        self._url = f"{str(config.url).rstrip('/')}/chat/completions"
        handlers: list[Any] = [_NoRedirects]
        if is_loopback(urlsplit(self._url).hostname or ""):
            handlers.append(urllib.request.ProxyHandler({}))  # nobody else sees what stays here
        self._opener = urllib.request.build_opener(*handlers)
        self._lock = threading.Lock()
        self._asked: dict[Path, threading.Lock] = {}
        self._next_start = 0.0
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Send nothing any more, and wake up whoever waits to."""
        self._stopped.set()

    def ask(self, messages: Sequence[Message]) -> Reply:
        """Return what the judge says; from the disk where it has said it before.

        UserError where it refuses the request, JudgeError where it fails again and again.
        """
        body = self._body(messages)
        file = self._file_of(body)
        with self._lock:
            alone = self._asked.setdefault(file, threading.Lock())
        with alone:  # two models that answered alike are judged once
            if (kept := _read(file)) is not None:
                return kept
            reply = self._ask_again_and_again(json.dumps(body).encode())
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, json.dumps(asdict(reply), ensure_ascii=False) + "\n")
            return reply

    def forget(self, messages: Sequence[Message]) -> None:
        """Remove what the judge has said to these messages."""
        self._file_of(self._body(messages)).unlink(missing_ok=True)

    def _body(self, messages: Sequence[Message]) -> dict[str, Any]:
        given = {
            name: value for name, value in self._config.parameters.items() if value is not None
        }
        return {"model": self._config.model, "messages": list(messages), **given}

    def _file_of(self, body: Mapping[str, Any]) -> Path:
        asked = json.dumps([self._url, body], sort_keys=True)
        return self._cache / f"{hashlib.sha256(asked.encode()).hexdigest()}.json"

    def _ask_again_and_again(self, body: bytes) -> Reply:
        wait, problem = FIRST_WAIT, ""
        for number in range(self._config.max_retries + 1):
            if number:
                self._pause(wait)
            self._wait_for_turn()
            try:
                return self._ask_once(body)
            except _Retry as failure:
                problem = str(failure)
                if failure.wait is not None and failure.wait > LONGEST_WAIT:
                    raise JudgeError(
                        self._words(f"{problem}, and asks to wait {failure.wait:.0f} s")
                    ) from None
                doubled = FIRST_WAIT * 2**number * random.uniform(1, 1.25)  # not all at once
                wait = min(LONGEST_WAIT, doubled) if failure.wait is None else failure.wait
        tries = self._config.max_retries + 1
        raise JudgeError(self._words(f"{problem} ({tries} {'try' if tries == 1 else 'tries'})"))

    def _ask_once(self, body: bytes) -> Reply:
        headers = {"content-type": "application/json", "user-agent": "loft"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self._url, body, headers)
        limit = self._config.timeout_seconds
        deadline = time.monotonic() + limit
        try:
            with self._opener.open(request, timeout=limit) as response:
                data = _read_whole(response, deadline)
                if response.length:
                    raise _Retry(f"broke off, {response.length} bytes before its end")
                return _reply(data)
        except urllib.error.HTTPError as error:
            self._raise_for(error, deadline)
        except TimeoutError as error:
            raise _Retry(f"no answer within {limit:g} s") from error
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise _Retry(f"no answer within {limit:g} s") from error
            raise _Retry(f"cannot be reached: {error.reason}") from error
        except (OSError, http.client.HTTPException) as error:
            raise _Retry(f"broke off: {error or type(error).__name__}") from error

    def _raise_for(self, error: urllib.error.HTTPError, deadline: float) -> NoReturn:
        """Raise UserError or _Retry, by a status that is not 200."""
        said = ""
        with contextlib.suppress(OSError, http.client.HTTPException, _Retry), error:
            said = _error_text(_read_whole(error, deadline))
        problem = f"status {error.code}{': ' * bool(said)}{said}"
        if error.code in (401, 403):
            raise UserError(
                self._words(f"{problem}; set the key: {KEY_VARIABLE}=... in the environment")
            )
        if error.code in REFUSALS or 300 <= error.code < 400:
            fix = "evaluation.judge.url, evaluation.judge.model or evaluation.judge.parameters"
            raise UserError(self._words(f"{problem}; type another {fix}"))
        raise _Retry(problem, _retry_after(error.headers.get("retry-after")))

    def _words(self, problem: str) -> str:
        if self._key:
            problem = problem.replace(self._key, "<redacted>")
        return f"judge {self._config.model} at {self._config.url}: {printable(redact(problem))}"

    def _wait_for_turn(self) -> None:
        if self._config.requests_per_minute is None:
            return
        with self._lock:
            now = time.monotonic()
            start = max(now, self._next_start)
            self._next_start = start + 60 / self._config.requests_per_minute
        self._pause(start - now)

    def _pause(self, seconds: float) -> None:
        if self._stopped.wait(max(0.0, seconds)):
            raise JudgeError(self._words("not asked any more"))


class _Retry(Exception):
    """A failure that may pass; `wait` is the seconds that the endpoint asks for."""

    def __init__(self, problem: str, wait: float | None = None) -> None:
        self.wait = wait
        super().__init__(problem)


def _read(file: Path) -> Reply | None:
    """Return what a judge has said before; None where there is nothing, or half of it."""
    try:
        return replace(Reply(**json.loads(file.read_text(encoding="utf-8"))), is_cached=True)
    except (OSError, ValueError, TypeError):
        return None


def _read_whole(response: Any, deadline: float) -> bytes:
    data = b""
    while chunk := response.read1(2**16):
        data += chunk
        if len(data) > MAX_BYTES:
            raise _Retry(f"an answer of more than {MAX_BYTES // 2**20} MiB")
        if time.monotonic() > deadline:
            raise TimeoutError
    return data


def _reply(data: bytes) -> Reply:
    """Read a chat completion; _Retry where it is something else."""
    try:
        answer = json.loads(data)
        text = answer["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        text = None
    if not isinstance(text, str):
        start = data[:80].decode("utf-8", "replace")
        raise _Retry(f"answered with something else than a chat completion: {start!r}")
    usage = answer.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    read, written = (
        count if isinstance(count := usage.get(name), int) else 0
        for name in ("prompt_tokens", "completion_tokens")
    )
    return Reply(text, read, written)


def _error_text(data: bytes) -> str:
    """Return what an endpoint says of an error, in OpenAI's form or as it stands."""
    text = data.decode("utf-8", "replace")
    with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):
        text = str(json.loads(data)["error"]["message"])
    return text.strip()[:200]


def _retry_after(value: str | None) -> float | None:
    """Return the seconds of a Retry-After header: a number, or a date."""
    if value is None:
        return None
    with contextlib.suppress(ValueError):
        return max(0.0, float(value))
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    return None
