"""What the server takes: its settings, key and address, and requests of OpenAI's API.

Every error of a request names the field. Imports neither torch nor a web framework: `--help` and
the first checks must not wait for one.
"""

from __future__ import annotations

import errno
import json
import math
import os
import socket
import sys
from dataclasses import dataclass
from typing import Any

from app.evaluation.conversation import ConversationConfig
from app.process.launch import is_loopback
from common.errors import UserError, nearest
from common.facts import setting
from common.redaction import redact
from common.text import printable
from data_modules import Turn

KEY_VARIABLE = "LOFT_SERVE_KEY"
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""roles of OpenAI's messages, and the role that chat templates have for each"""
_MAX_MESSAGES, _MAX_STOPS, _MAX_STOP_CHARACTERS, _MAX_TOKENS = 512, 4, 256, 131_072
_MAX_SHOWN = 80
"""maximum number of characters of a request that an error message quotes"""
INTERNAL_ERROR = "internal server error; the server's terminal shows the cause"
_SAMPLING = "model max_tokens temperature top_p seed stop stream stream_options"
_CHAT_FIELDS = ("messages", "max_completion_tokens", *_SAMPLING.split())
_TEXT_FIELDS = ("prompt", *_SAMPLING.split())
_TEXTS = "prompt_cache_key prompt_cache_retention safety_identifier service_tier user"
_IGNORED_FIELDS: dict[str, type] = {
    "parallel_tool_calls": bool,
    **dict.fromkeys(("metadata", "prediction", "prompt_cache_options"), dict),
    **dict.fromkeys(_TEXTS.split(), str),
}
"""fields with their types that clients send, and that would not change an answer here"""
_ONE_ANSWER = "a request gets one answer; send it again for another"
_NO_TOOLS = "answers are plain text; tool calls are not parsed"
_OWN_TEMPLATE = "the chat template of training is always used"
_NO_LIKELIHOODS = "likelihoods are not returned; `python -m app.evaluate` measures them"
_UNSUPPORTED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "audio": ("answers are plain text", ()),
    "best_of": (_ONE_ANSWER, (1,)),
    "chat_template": (_OWN_TEMPLATE, ()),
    "chat_template_kwargs": (_OWN_TEMPLATE, ()),
    "echo": ("an answer does not repeat its prompt", (False,)),
    "frequency_penalty": ("tokens are sampled without penalties; only 0", (0,)),
    "function_call": (_NO_TOOLS, ("none", "auto")),
    "functions": (_NO_TOOLS, ([],)),
    "logit_bias": ("tokens are sampled without biases", ({},)),
    "logprobs": (_NO_LIKELIHOODS, (False,)),
    "modalities": ("answers are plain text", (["text"],)),
    "moderation": ("this server does not moderate", ()),
    "n": (_ONE_ANSWER, (1,)),
    "presence_penalty": ("tokens are sampled without penalties; only 0", (0,)),
    "reasoning_effort": (_OWN_TEMPLATE, ()),
    "response_format": ("answers are plain text", ({"type": "text"},)),
    "store": ("this server keeps no answers", (False,)),
    "suffix": ("text is only continued, not filled in", ("",)),
    "tool_choice": (_NO_TOOLS, ("none", "auto")),
    "tools": (_NO_TOOLS, ([],)),
    "top_logprobs": (_NO_LIKELIHOODS, (0,)),
    "verbosity": ("an answer is as long as training made it; use max_tokens", ()),
    "web_search_options": ("this server opens no URL", ()),
}
"""field -> why it is not supported, and values that are accepted, as the server acts so anyway"""


@dataclass(kw_only=True, slots=True)
class ServeConfig:
    engine: str = setting("loft", choices=("loft", "vllm"), shown=True)
    """loft = the built-in server; vllm = print the command that starts vLLM with the trained model
    in a separate environment, and exit"""
    host: str = setting("127.0.0.1", shown=True, grants="host")
    """address to listen on; any other than a loopback address requires an API key in the
    environment variable LOFT_SERVE_KEY"""
    port: int = setting(8000, ge=0, le=65535, shown=True)
    """port to listen on; 0 = any free port, which is printed"""
    model_name: str | None = setting(None, aliases=("served_model_name",), grants="nothing")
    """model name in API requests; null = the name of the run, or of the base model's folder"""
    max_waiting: int = setting(16, ge=0, le=1024)
    """maximum number of requests that wait while one is answered; further ones get status 503"""
    timeout_seconds: float = setting(300.0, gt=0, le=86_400)
    """time limit of a request, from its arrival to the end of its answer, in seconds"""


def read_server_key(config: ServeConfig) -> str | None:
    """Return the API key from the environment; raise UserError if it is required but not set.

    The key is not a setting, because settings are printed and saved.
    """
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if key:
        return key
    if not is_loopback(config.host):
        raise UserError(
            f"serve.host={config.host}: anyone who can reach this address could use the model; set "
            f"an API key in the environment ({KEY_VARIABLE}=... before the command), or leave out "
            "serve.host (default: 127.0.0.1)"
        )
    return None


def open_socket(config: ServeConfig) -> socket.socket:
    """Return a socket that listens at the configured address; raise UserError if it cannot.

    Called before the model loads, so that no other program takes the port meanwhile.
    """
    where = f"serve.host={config.host} serve.port={config.port}"
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Clients that connect now wait in the backlog until the model is loaded.
        listener.listen(128)
    except (OSError, UnicodeError) as error:
        if listener is not None:
            listener.close()
        code = getattr(error, "errno", None)
        if code == errno.EADDRINUSE:
            fix = "another program listens on this port; use another serve.port (0 = any)"
        elif code == errno.EACCES:
            fix = "ports below 1024 need administrator rights; use serve.port=8000"
        else:
            fix = f"this machine has no such address ({error}); use serve.host=127.0.0.1"
        raise UserError(f"{where}: {fix}") from error
    return listener


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class RequestError(ValueError):
    """A refused request, with the fields of OpenAI's error format."""

    def __init__(
        self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        error_type = "invalid_request_error" if self.status < 500 else "server_error"
        fields = {"message": str(self), "type": error_type, "param": self.param, "code": self.code}
        return {"error": fields}

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers that this status requires."""
        if self.status == 401:
            return {"www-authenticate": "Bearer"}
        return {"retry-after": "5"} if self.status == 503 else {}


def _invalid(where: str, problem: str, **fields: Any) -> RequestError:
    return RequestError(f"{where}: {problem}", where, **fields)


def print_error(error: Exception) -> None:
    """Print an internal error to the server's terminal; clients never see its details."""
    shown = printable(redact(f"{type(error).__name__}: {error}"))
    print(f"error while answering: {shown}", file=sys.stderr)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionRequest:
    turns: tuple[Turn, ...]
    """the conversation to answer; empty if a text is to be continued"""
    text: str | tuple[int, ...]
    """the text to continue, or its tokens; empty in a chat"""
    sampling: ConversationConfig
    stop_texts: tuple[str, ...]
    seed: int | None
    is_stream: bool
    include_usage: bool
    """whether a streamed answer ends with a chunk of token counts"""

    @property
    def is_chat(self) -> bool:
        return bool(self.turns)


def parse_body(body: bytes) -> Any:
    """Parse a request body; raise RequestError if it is not JSON."""
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else _quote(str(error))
        raise RequestError(f"the body is not JSON: {why}") from error


def parse_chat_request(body: Any, model: str, defaults: ConversationConfig) -> CompletionRequest:
    """Validate the parsed body of a chat completion request; raise RequestError.

    `defaults` apply to fields that the request leaves out; the default system prompt applies if no
    message has the role system.
    """
    fields = _parse_fields(body, _CHAT_FIELDS, '{"messages": ...}')
    turns = _parse_messages(fields)
    if defaults.system is not None and all(turn.role != "system" for turn in turns):
        turns = [Turn("system", defaults.system), *turns]
    return _parse_completion(fields, tuple(turns), "", model, defaults)


def parse_text_request(body: Any, model: str, defaults: ConversationConfig) -> CompletionRequest:
    """Validate the parsed body of a text completion request; raise RequestError.

    `defaults` apply to fields that the request leaves out, without the system prompt.
    """
    fields = _parse_fields(body, _TEXT_FIELDS, '{"prompt": ...}')
    return _parse_completion(fields, (), _parse_prompt(fields), model, defaults)


def _parse_fields(body: Any, supported: tuple[str, ...], expected: str) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise RequestError(f"the body is not a JSON object; expected {expected}")
    # As in OpenAI's own clients, null is the same as a field that is left out.
    fields = {name: value for name, value in body.items() if value is not None}
    for name, value in fields.items():
        _check_supported(name, value, supported)
    return fields


def _parse_completion(
    fields: dict[str, Any],
    turns: tuple[Turn, ...],
    text: str | tuple[int, ...],
    model: str,
    defaults: ConversationConfig,
) -> CompletionRequest:
    _check_model(fields, model)
    is_stream = _parse_boolean(fields, "stream")
    options = fields.get("stream_options", {})
    if not isinstance(options, dict) or (options and not is_stream):
        raise _invalid("stream_options", "expected an object, and only with stream=true")
    if unknown := set(options) - {"include_usage", "include_obfuscation"}:
        raise _unsupported(f"stream_options.{min(unknown)}", ())
    seed = _parse_number(fields, "seed", -(2**63), 2**63 - 1, is_int=True)
    temperature = _parse_number(fields, "temperature", 0, 2)
    top_p = _parse_number(fields, "top_p", 0, 1)
    if top_p == 0:  # only the likeliest token is left
        temperature, top_p = 0, 1
    return CompletionRequest(
        turns=turns,
        text=text,
        sampling=ConversationConfig(
            max_new_tokens=_parse_max_tokens(fields) or defaults.max_new_tokens,
            temperature=defaults.temperature if temperature is None else float(temperature),
            top_p=defaults.top_p if top_p is None else float(top_p),
        ),
        stop_texts=_parse_stop_texts(fields),
        seed=None if seed is None else int(seed),
        is_stream=is_stream,
        include_usage=_parse_boolean(options, "include_usage"),
    )


def check_no_control_tokens(turns: tuple[Turn, ...], control_texts: tuple[str, ...]) -> None:
    """Raise RequestError if a message contains a control token, which could end or start a turn."""
    for number, turn in enumerate(turns):
        for text in control_texts:
            if text in turn.content:
                raise _invalid(
                    "messages",
                    f"the {turn.role} message at position {number + 1} of the prompt contains the "
                    f"control token {text}, which could end or start a turn; remove it",
                )


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def _quote(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    text = text.encode("utf-8", "backslashreplace").decode()
    return printable(text[:_MAX_SHOWN]) + ("..." if len(text) > _MAX_SHOWN else "")


def _unsupported(name: str, supported: tuple[str, ...]) -> RequestError:
    reason, _ = _UNSUPPORTED.get(name, ("", ()))
    reason = f": {reason}" if reason else nearest(name[:_MAX_SHOWN], supported)
    quoted = _quote(name)
    return RequestError(f"{quoted} is not supported{reason}", quoted, code="unsupported_field")


def _check_supported(name: str, value: Any, supported: tuple[str, ...]) -> None:
    if name in supported:
        return
    if name in _IGNORED_FIELDS:
        if not isinstance(value, _IGNORED_FIELDS[name]):
            kind = {dict: "an object", bool: "true or false", str: "a string"}[
                _IGNORED_FIELDS[name]
            ]
            raise _invalid(name, f"{_quote(value)} is not {kind}")
        return
    # The types are compared because True == 1 in Python.
    _, accepted = _UNSUPPORTED.get(name, ("", ()))
    if not any(
        value == one and isinstance(value, bool) == isinstance(one, bool) for one in accepted
    ):
        raise _unsupported(name, supported)


def _check_model(fields: dict[str, Any], model: str) -> None:
    requested = fields.get("model", model)
    if not isinstance(requested, str) or not requested:
        raise _invalid("model", f"expected a name; this server has the model {model}")
    if requested != model:
        problem = f"unknown model {_quote(requested)}; this server has the model {model}"
        raise _invalid("model", problem, status=404, code="model_not_found")


def _parse_boolean(fields: dict[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise _invalid(name, f"{_quote(value)} is not true or false")
    return bool(value)


def _parse_number(
    fields: dict[str, Any], name: str, low: float, high: float, *, is_int: bool = False
) -> float | None:
    value = fields.get(name)
    if value is None:
        return None
    types = (int,) if is_int else (int, float)
    is_valid = isinstance(value, types) and not isinstance(value, bool)
    if not is_valid or not low <= value <= high or not math.isfinite(value):
        kind = "whole number" if is_int else "number"
        raise _invalid(name, f"{_quote(value)} is not a {kind} from {low} to {high}")
    return value


def _parse_max_tokens(fields: dict[str, Any]) -> int | None:
    names = ("max_completion_tokens", "max_tokens")  # the second is the older name of the first
    numbers = [_parse_number(fields, name, 1, _MAX_TOKENS, is_int=True) for name in names]
    if None not in numbers and numbers[0] != numbers[1]:
        raise _invalid("max_tokens", "differs from max_completion_tokens; send only one of them")
    return next((int(number) for number in numbers if number is not None), None)


def _parse_stop_texts(fields: dict[str, Any]) -> tuple[str, ...]:
    stop = fields.get("stop", [])
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise _invalid("stop", "expected a string or a list of strings")
    if len(texts) > _MAX_STOPS or any(len(text) > _MAX_STOP_CHARACTERS for text in texts):
        most = f"at most {_MAX_STOPS} strings of at most {_MAX_STOP_CHARACTERS} characters"
        raise _invalid("stop", f"expected {most}")
    for text in texts:
        _check_characters(text, "stop")
    return tuple(filter(None, texts))  # some clients send an empty string for none


def _parse_prompt(fields: dict[str, Any]) -> str | tuple[int, ...]:
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise _invalid("prompt", f"{len(prompt)} prompts; {_ONE_ANSWER}")
        (prompt,) = prompt
    if isinstance(prompt, str) and prompt:
        return _check_characters(prompt, "prompt")
    is_tokens = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not is_tokens or not prompt:
        raise _invalid("prompt", "expected a text, or a list of token ids")
    return tuple(prompt)


def _parse_messages(fields: dict[str, Any]) -> list[Turn]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _invalid("messages", 'expected a non-empty list of {"role": ..., "content": ...}')
    if len(messages) > _MAX_MESSAGES:
        most = f"more than the maximum of {_MAX_MESSAGES}"
        raise _invalid("messages", f"{len(messages):,} messages, {most}")
    turns = [_parse_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    if turns[-1].role != "user":
        raise _invalid("messages", "the last message must have the role user")
    return turns


def _parse_message(message: Any, where: str) -> Turn:
    if not isinstance(message, dict):
        raise _invalid(where, 'expected an object {"role": ..., "content": ...}')
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise _invalid(f"{where}.role", f"{_quote(role)} is not one of {', '.join(_ROLES)}")
    for name, value in message.items():
        # Clients send an earlier answer back with its unused fields: null or empty. Templates do
        # not show the name of a participant.
        is_name = name == "name" and isinstance(value, str)
        if name not in ("role", "content") and value not in (None, []) and not is_name:
            raise _unsupported(f"{where}.{name[:_MAX_SHOWN]}", ())
    return Turn(_ROLES[role], _parse_content(message.get("content"), f"{where}.content"))


def _parse_content(content: Any, where: str) -> str:
    if isinstance(content, list) and content:
        content = "".join(_parse_part(part, f"{where}[{i}]") for i, part in enumerate(content))
    if not isinstance(content, str):
        raise _invalid(where, f"{_quote(content)} is not a string or a list of parts")
    return _check_characters(content, where)


def _check_characters(text: str, where: str) -> str:
    """Return a text; raise RequestError if it has lone surrogates, which have no tokens."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _invalid(where, "contains half a character (a lone surrogate)") from error
    return text


def _parse_part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise _invalid(
            where,
            f"parts of type {_quote(kind)} are not supported, only parts of type text; this server "
            "opens no URL and no file",
        )
    text = part.get("text")
    if not isinstance(text, str) or set(part) - {"type", "text", "prompt_cache_breakpoint"}:
        raise _invalid(where, 'expected {"type": "text", "text": ...}')
    return text
