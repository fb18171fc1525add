"""The part of OpenAI's chat API that is served: requests read, or refused by the field's name.

Needs no server and no torch.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from typing import Any

from app.evaluation.conversation import ConversationConfig
from app.process.errors import nearest
from data_modules import Turn, printable, redact

ROLES = ("system", "user", "assistant")
MAX_MESSAGES, MAX_STOPS, MAX_STOP_CHARACTERS, MAX_TOKENS = 512, 4, 256, 131_072
MAX_SHOWN = 80
"""characters of a request that an error quotes"""
SERVER_FAILED = "the server failed; its terminal says why"
SAME_AS_NONE: dict[str, Any] = {
    "n": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "logprobs": False,
    "response_format": {"type": "text"},
    "store": False,
    "tool_choice": "none",
    "tools": [],
}
"""fields whose one value here is what the server does anyway"""
REASONS = {
    "n": "one answer at a time is generated; ask again for another",
    "tools": "this server answers in text, and reads no calls out of it",
    "functions": "this server answers in text, and reads no calls out of it",
    "chat_template": "the template is the one of training",
    "chat_template_kwargs": "the template is the one of training",
    "response_format": "answers are text",
}
KNOWN = (
    "model",
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "user",  # says who asks, which changes no answer
)


class RequestError(ValueError):
    """Refuse a request, in the form of OpenAI's errors."""

    def __init__(
        self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        """The error as OpenAI writes it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        fields = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": fields}

    @property
    def headers(self) -> dict[str, str]:
        """What HTTP has a client told besides."""
        if self.status == 401:
            return {"www-authenticate": "Bearer"}
        return {"retry-after": "5"} if self.status == 503 else {}


def print_failure(error: Exception) -> None:
    """Print in the server's terminal what no client is told."""
    shown = printable(redact(f"{type(error).__name__}: {error}"))
    print(f"error while answering: {shown}", file=sys.stderr)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """One request for an answer, every field checked."""

    turns: tuple[Turn, ...]
    how: ConversationConfig
    stop_texts: tuple[str, ...]
    seed: int | None
    is_stream: bool
    has_usage: bool
    """whether a stream ends with the numbers of tokens"""


def read_json(body: bytes) -> Any:
    """Return what a body holds; RequestError where it is not JSON."""
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else _shown(str(error))
        raise RequestError(f"the body is not JSON: {why}") from error


def read_chat(body: Any, model: str, defaults: ConversationConfig) -> ChatRequest:
    """Read a request for a chat completion; RequestError names the field that is wrong.

    `defaults` hold where the request says nothing; its system prompt where no message has one.
    """
    if not isinstance(body, dict):
        raise RequestError('the body is not an object: {"model": ..., "messages": [...]}')
    # As in OpenAI's own clients, null is the same as a field that is left out.
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        _check_supported(name, value)
    _check_model(given, model)
    is_stream = _boolean(given, "stream")
    options = given.get("stream_options", {})
    if not isinstance(options, dict) or (options and not is_stream):
        raise RequestError("stream_options: an object, beside stream=true alone", "stream_options")
    if unknown := set(options) - {"include_usage", "include_obfuscation"}:
        raise _unsupported(f"stream_options.{min(unknown)}")
    seed = _number(given, "seed", -(2**63), 2**63 - 1, whole=True)
    temperature = _number(given, "temperature", 0, 2)
    top_p = _number(given, "top_p", 0, 1)
    if top_p == 0:
        raise RequestError("top_p: 0 is not above 0; type 1, or temperature=0", "top_p")
    turns = _read_messages(given)
    if defaults.system is not None and all(turn.role != "system" for turn in turns):
        turns = [Turn("system", defaults.system), *turns]
    return ChatRequest(
        turns=tuple(turns),
        how=ConversationConfig(
            max_new_tokens=_max_tokens(given) or defaults.max_new_tokens,
            temperature=defaults.temperature if temperature is None else float(temperature),
            top_p=defaults.top_p if top_p is None else float(top_p),
        ),
        stop_texts=_stop_texts(given),
        seed=None if seed is None else int(seed),
        is_stream=is_stream,
        has_usage=_boolean(options, "include_usage"),
    )


def check_contents(turns: tuple[Turn, ...], control_texts: tuple[str, ...]) -> None:
    """Refuse text that the tokenizer would read as a control token: it could end or open a turn."""
    for number, turn in enumerate(turns):
        for text in control_texts:
            if text in turn.content:
                raise RequestError(
                    f"messages: the {turn.role}'s text (number {number + 1} as the model reads "
                    f"them) holds the control token {text}, which would act as one; take it out",
                    "messages",
                )


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    text = text.encode("utf-8", "backslashreplace").decode()
    return printable(text[:MAX_SHOWN]) + ("..." if len(text) > MAX_SHOWN else "")


def _unsupported(name: str) -> RequestError:
    reason = f": {REASONS[name]}" if name in REASONS else nearest(name[:MAX_SHOWN], KNOWN)
    shown = _shown(name)
    return RequestError(f"{shown} is not supported here{reason}", shown, code="unsupported_field")


def _check_supported(name: str, value: Any) -> None:
    if name in KNOWN:
        return
    same = SAME_AS_NONE.get(name)
    # True == 1 in Python.
    if name in SAME_AS_NONE and value == same and isinstance(value, bool) == isinstance(same, bool):
        return
    raise _unsupported(name)


def _check_model(given: dict[str, Any], model: str) -> None:
    requested = given.get("model")
    if not isinstance(requested, str) or not requested:
        raise RequestError(f"model: a name; this server has {model}", "model")
    if requested != model:
        raise RequestError(
            f"model: there is no {_shown(requested)} here; this server has {model}",
            "model",
            status=404,
            code="model_not_found",
        )


def _boolean(given: dict[str, Any], name: str) -> bool:
    value = given.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise RequestError(f"{name}: {_shown(value)} is not true or false", name)
    return value


def _number(
    given: dict[str, Any], name: str, low: float, high: float, *, whole: bool = False
) -> float | None:
    """Return a number of the request between two bounds; None where it is not given."""
    value = given.get(name)
    if value is None:
        return None
    kinds = (int,) if whole else (int, float)
    good = isinstance(value, kinds) and not isinstance(value, bool)
    if not good or not low <= value <= high or not math.isfinite(value):
        kind = "whole number" if whole else "number"
        raise RequestError(f"{name}: {_shown(value)} is not a {kind} from {low} to {high}", name)
    return value


def _max_tokens(given: dict[str, Any]) -> int | None:
    names = ("max_completion_tokens", "max_tokens")  # the second is the older name of the first
    numbers = [_number(given, name, 1, MAX_TOKENS, whole=True) for name in names]
    if None not in numbers and numbers[0] != numbers[1]:
        raise RequestError(
            "max_tokens: not what max_completion_tokens says; keep one", "max_tokens"
        )
    return next((int(number) for number in numbers if number is not None), None)


def _stop_texts(given: dict[str, Any]) -> tuple[str, ...]:
    stop = given.get("stop", [])
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise RequestError("stop: a text, or a list of texts", "stop")
    if len(texts) > MAX_STOPS or any(not 0 < len(text) <= MAX_STOP_CHARACTERS for text in texts):
        raise RequestError(
            f"stop: at most {MAX_STOPS} texts of 1 to {MAX_STOP_CHARACTERS} characters", "stop"
        )
    return tuple(texts)


def _read_messages(given: dict[str, Any]) -> list[Turn]:
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError('messages: a list of {"role": ..., "content": ...}', "messages")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(
            f"messages: {len(messages):,} of them, more than {MAX_MESSAGES}", "messages"
        )
    turns = [_read_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    if turns[-1].role != "user":
        raise RequestError(
            "messages: the last one is not the user's, so nothing is asked", "messages"
        )
    return turns


def _read_message(message: Any, where: str) -> Turn:
    if not isinstance(message, dict):
        raise RequestError(f'{where}: not an object {{"role": ..., "content": ...}}', where)
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(
            f"{where}.role: {_shown(role)} is none of {', '.join(ROLES)}", f"{where}.role"
        )
    for name, value in message.items():
        # Clients send an answer back with fields that it does not have: null, or empty.
        if name not in ("role", "content") and value not in (None, []):
            raise _unsupported(f"{where}.{name[:MAX_SHOWN]}")
    return Turn(role, _read_content(message.get("content"), f"{where}.content"))


def _read_content(content: Any, where: str) -> str:
    if isinstance(content, list) and content:
        content = "".join(_read_part(part, f"{where}[{i}]") for i, part in enumerate(content))
    if not isinstance(content, str):
        raise RequestError(f"{where}: {_shown(content)} is not a text or a list of parts", where)
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{where}: half a character (a lone surrogate)", where) from error
    return content


def _read_part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise RequestError(
            f"{where}: a part of type {_shown(kind)}; this server reads parts of type text, and "
            "opens no URL and no file",
            where,
        )
    text = part.get("text")
    if not isinstance(text, str) or set(part) - {"type", "text"}:
        raise RequestError(f'{where}: not {{"type": "text", "text": ...}}', where)
    return text
