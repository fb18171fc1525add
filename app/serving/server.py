"""The web server: routes, access control and error responses, on uvicorn in one process.

A request is allowed by its Host and Origin headers and the API key, then parsed and validated,
before it waits for its turn. Completions are generated one at a time, as neither tokenizer nor
model is thread-safe; a few requests may wait.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import ipaddress
import json
import re
import socket
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import anyio
import uvicorn
from anyio import to_thread
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from app.evaluation.conversation import ConversationConfig, Reply, Responder
from app.process.launch import is_loopback
from app.process.signals import exit_after_grace, signal_received
from app.serving import api
from common.errors import DataError, UserError
from common.text import printable

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY = 2**20
"""maximum size of a request body, in bytes"""
_MAX_DISCARDED = 2**24
"""size up to which a body that is too long is read to its end, in bytes: many clients see no
response while they are still sending"""
_ROUTES = (
    "this server has POST /v1/chat/completions and /v1/completions, and GET /v1/models, /health "
    "and /"
)
BODY_SECONDS = 30.0
"""time limit for receiving the body of a request, in seconds"""
HEADER_SECONDS = 15.0
"""time limit for receiving the headers of a request, in seconds"""
_MAX_CONNECTIONS = 256
_STOP_SECONDS = 1
"""grace period of running requests when the server stops, in seconds"""
_NO_SNIFFING = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
PAGE = Path(__file__).with_name("chat.html")


def build_app(
    responder: Responder,
    config: api.ServeConfig,
    defaults: ConversationConfig,
    model: str,
    key: str | None = None,
) -> ASGIApp:
    """Build the application: the page, `/v1/models`, the two kinds of completions and `/health`.

    `model` is the name that requests must use; `key` is the API key, None if none is required.
    """
    page = PAGE.read_text(encoding="utf-8")
    completions = _CompletionQueue(responder, config, model)
    model_card = {"id": model, "object": "model", "created": int(time.time()), "owned_by": "loft"}

    async def show_page(request: Request) -> Response:
        return HTMLResponse(page, headers={"content-security-policy": _page_policy(page)})

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model_card]})

    async def one_model(request: Request) -> Response:
        if request.path_params["name"] != model:
            raise api.RequestError(f"this server has the model {model}", "model", status=404)
        return JSONResponse(model_card)

    async def complete(request: Request) -> ASGIApp:
        arrived = time.monotonic()
        parse = api.parse_chat_request if "chat" in request.url.path else api.parse_text_request
        try:
            found = parse(api.parse_body(await _read_body(request)), model, defaults)
        except RecursionError as error:
            raise api.RequestError("the body is nested too deeply") from error
        api.check_no_control_tokens(found.turns, responder.control_texts)
        return completions.response(found, arrived)

    app = Starlette(
        routes=[
            Route("/", show_page),
            Route("/health", health),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", one_model),
            Route("/v1/chat/completions", complete, methods=["POST"]),
            Route("/v1/completions", complete, methods=["POST"]),
        ],
        exception_handlers=dict.fromkeys((api.RequestError, HTTPException, Exception), _refuse),
    )
    app.router.redirect_slashes = False
    return _AccessMiddleware(app, config.host, key)


async def _refuse(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        route = f"{request.method} {printable(request.url.path)[:80]}"
        error = api.RequestError(f"{route} is not available; {_ROUTES}", status=error.status_code)
    if not isinstance(error, api.RequestError):  # `_AccessMiddleware` prints the cause
        error = api.RequestError(api.INTERNAL_ERROR, status=500)
    return JSONResponse(error.body, error.status, error.headers)


def _page_policy(page: str) -> str:
    allowed = [
        "'sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() + "'"
        for tag in ("script", "style")
        for content in re.findall(f"<{tag}>(.*?)</{tag}>", page, re.S)
    ]
    return (
        f"default-src 'none'; script-src {allowed[0]}; style-src {allowed[1]}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


async def _read_body(request: Request) -> bytes:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise api.RequestError("Content-Type: expected application/json", status=415)
    too_long = api.RequestError(f"the body is longer than {MAX_BODY:,} bytes", status=413)
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > _MAX_DISCARDED:
        raise too_long
    body, size = bytearray(), 0
    try:
        with anyio.fail_after(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > _MAX_DISCARDED:
                    raise too_long
                if size <= MAX_BODY:
                    body += part
    except TimeoutError:
        raise api.RequestError(
            f"the body was not received within {BODY_SECONDS:g} seconds", status=408
        ) from None
    if size > MAX_BODY:
        raise too_long
    return bytes(body)


class Protocol(H11Protocol):
    """HTTP/1.1 with JSON errors for malformed requests; idle new connections are closed."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(HEADER_SECONDS, self._close_unused)

    def _close_unused(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        if self.cycle is None or self.cycle.response_complete:
            body = json.dumps(api.RequestError(msg).body).encode()
            self.transport.write(
                b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
                b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
            )
        self.transport.close()


class Server(uvicorn.Server):
    """Stops on the signals that `install_signal_handlers` records, in place of uvicorn's own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def on_tick(self, counter: int) -> bool:
        if signal_received() is not None:
            exit_after_grace()
            self.should_exit = True
        return await super().on_tick(counter)


def build_server(app: ASGIApp) -> uvicorn.Server:
    """Build the server of `app`; `server.run([listener])` returns after a signal."""
    return Server(
        uvicorn.Config(
            app,
            http=Protocol,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=_MAX_CONNECTIONS,
            timeout_graceful_shutdown=_STOP_SECONDS,
        )
    )


class _AccessMiddleware:
    """ASGI middleware that accepts requests for this host, from its own page, with the API key.

    The Host check stops DNS rebinding, by which another site's name resolves to this machine. The
    Origin check stops pages of other sites that send requests here.
    """

    def __init__(self, app: ASGIApp, host: str, key: str | None) -> None:
        self._app, self._host, self._key = app, host, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward an allowed request; respond to any other with an error."""
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.encode(), value.encode()) for name, value in _NO_SNIFFING.items()]
                message["headers"] = [*message.get("headers", []), *extra]
            await send(message)

        try:
            self._check(scope)
            await self._app(scope, receive, send_with_headers)
        except api.RequestError as error:
            refusal = JSONResponse(error.body, error.status, error.headers)
            await refusal(scope, receive, send_with_headers)
        except ClientDisconnect:
            pass
        except Exception as error:  # noqa: BLE001  the response was sent; keep serving
            api.print_error(error)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_own(hosts[0]):
            raise api.RequestError(
                f"Host: {printable(', '.join(hosts))[:80]} is not an address of this server",
                status=403,
            )
        origin = headers.get("origin")
        if origin is not None and origin not in (f"http://{hosts[0]}", f"https://{hosts[0]}"):
            raise api.RequestError("Origin: requests from other sites are refused", status=403)
        if self._key is None or not scope["path"].startswith("/v1"):
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # Digests of equal length, so that the time of the comparison reveals nothing about the key.
        digests = [
            hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
            for key in (given.strip(), self._key)
        ]
        if scheme.lower() != "bearer" or not hmac.compare_digest(*digests):
            raise api.RequestError(
                "Authorization: expected Bearer KEY, with the key this server was started with",
                status=401,
                code="invalid_api_key",
            )

    def _is_own(self, host: str) -> bool:
        """Return whether a Host header names this machine.

        The port is ignored, because a tunnel may use another one.
        """
        try:
            name = (urlsplit(f"//{host}").hostname or "").lower()
        except ValueError:
            return False
        names = {"localhost", self._host.lower()}
        if not is_loopback(self._host):
            names.add(socket.gethostname().lower())
        if name in names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        # DNS rebinding needs a host name, so an IP address is safe.
        return address.is_loopback or not is_loopback(self._host)


class _CompletionQueue:
    """Answer one request at a time; refuse further requests if too many are waiting."""

    def __init__(self, responder: Responder, config: api.ServeConfig, model: str) -> None:
        self._responder, self._config, self._model = responder, config, model
        self._lock = asyncio.Lock()
        self._num_waiting = 0

    def response(self, request: api.CompletionRequest, arrived: float) -> ASGIApp:
        """Return the ASGI response to a request; it stops generating if the client disconnects.

        `arrived` is the time of arrival by `time.monotonic`.
        """

        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            async with anyio.create_task_group() as group:

                async def cancel_on_disconnect() -> None:
                    while (await receive())["type"] != "http.disconnect":
                        pass
                    group.cancel_scope.cancel()

                group.start_soon(cancel_on_disconnect)
                stream = _EventStream(send)
                try:
                    body = await self._answer_in_time(request, arrived, stream)
                except api.RequestError as error:
                    if not stream.is_open:
                        await JSONResponse(error.body, error.status, error.headers)(
                            scope, receive, send
                        )
                    else:
                        await stream.write(error.body)
                else:
                    if not stream.is_open:
                        await JSONResponse(body)(scope, receive, send)
                if stream.is_open:
                    await stream.close()
                group.cancel_scope.cancel()

        return respond

    async def _answer_in_time(
        self, request: api.CompletionRequest, arrived: float, stream: _EventStream
    ) -> dict[str, Any]:
        left = self._config.timeout_seconds - (time.monotonic() - arrived)
        try:
            with anyio.fail_after(max(left, 0)):
                async with self._wait_for_turn():
                    return await self._answer(request, stream)
        except api.RequestError:
            raise
        except TimeoutError:
            seconds = f"{self._config.timeout_seconds:g}"
            message = f"answer not complete within {seconds} seconds (serve.timeout_seconds)"
            raise api.RequestError(message, status=503, code="timeout") from None
        except Exception as error:
            api.print_error(error)
            raise api.RequestError(api.INTERNAL_ERROR, status=500) from error

    @contextlib.asynccontextmanager
    async def _wait_for_turn(self) -> AsyncIterator[None]:
        if self._lock.locked() and self._num_waiting >= self._config.max_waiting:
            raise api.RequestError(
                f"the server is busy and {self._num_waiting} requests are waiting; retry later",
                status=503,
                code="overloaded",
            )
        self._num_waiting += 1
        try:
            await self._lock.acquire()
        finally:
            self._num_waiting -= 1
        try:
            yield
        finally:
            self._lock.release()

    async def _answer(self, request: api.CompletionRequest, stream: _EventStream) -> dict[str, Any]:
        """Generate an answer, stream it if requested, and return the full response body."""
        started = time.monotonic()
        try:
            ids = await to_thread.run_sync(
                self._responder.prompt_ids, request.turns or request.text
            )
        except UserError as error:
            code = "context_length_exceeded"
            name = "messages" if request.is_chat else "prompt"
            raise api.RequestError(str(error), name, code=code) from error
        except DataError as error:
            raise api.RequestError(f"messages: {error}", "messages") from error
        reply = Reply(ids, continues_text=not request.is_chat)
        pieces = self._responder.answer(
            reply, request.sampling, stop_texts=request.stop_texts, seed=request.seed
        )
        completion = _Completion(self._model, reply, request.is_chat)
        text: list[str] = []
        try:
            if request.is_stream and request.is_chat:
                await stream.write(completion.chunk(role="assistant"))
            while (piece := await to_thread.run_sync(next, pieces, None)) is not None:
                text.append(piece)
                if request.is_stream and piece:
                    await stream.write(completion.chunk(piece))
        finally:
            # Shielded, so that generation also stops (at its next token) if the client disconnects.
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(pieces.close)
        if request.is_stream:
            await stream.write(completion.chunk(is_last=True))
            if request.include_usage:
                await stream.write(completion.usage_chunk())
        print(
            f"answered: {len(reply.prompt_ids):,} prompt + {reply.num_tokens:,} completion tokens "
            f"in {time.monotonic() - started:.2f} s",
            flush=True,
        )
        return completion.body("".join(text))


@dataclass(frozen=True, slots=True)
class _Completion:
    """One completion in OpenAI's format: the answer to a chat, or the continuation of a text."""

    model: str
    reply: Reply
    is_chat: bool
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def usage(self) -> dict[str, int]:
        prompt, answer = len(self.reply.prompt_ids), self.reply.num_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
        }

    @property
    def finish_reason(self) -> str:
        """`stop` after a stop token or stop text, `length` at the token limit."""
        return "stop" if self.reply.is_finished else "length"

    def body(self, text: str) -> dict[str, Any]:
        """Return the response body of a request without streaming."""
        message = {"role": "assistant", "content": text, "refusal": None}
        content = {"message": message} if self.is_chat else {"text": text}
        kind = "chat.completion" if self.is_chat else "text_completion"
        choice = {**content, "logprobs": None, "finish_reason": self.finish_reason}
        return self._response(kind, choice) | {"usage": self.usage}

    def chunk(self, text: str = "", *, role: str = "", is_last: bool = False) -> dict[str, Any]:
        """Return one chunk of a streamed answer; the first one of a chat has its role."""
        delta = {"role": role, "content": ""} if role else {} if is_last else {"content": text}
        content = {"delta": delta} if self.is_chat else {"text": text, "logprobs": None}
        return self._chunk({**content, "finish_reason": self.finish_reason if is_last else None})

    def usage_chunk(self) -> dict[str, Any]:
        return self._chunk() | {"usage": self.usage}

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        return self._response(
            "chat.completion.chunk" if self.is_chat else "text_completion", *choices
        )

    def _response(self, kind: str, *choices: dict[str, Any]) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": [{"index": 0, **choice} for choice in choices]}


class _EventStream:
    """A stream of server-sent events; status and headers are sent before the first event."""

    def __init__(self, send: Send) -> None:
        self._send, self.is_open = send, False

    async def write(self, event: Mapping[str, Any]) -> None:
        if not self.is_open:
            headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            self.is_open = True
        await self._body(f"data: {json.dumps(event)}\n\n", more=True)

    async def close(self) -> None:
        """Send the final event and end the response."""
        await self._body("data: [DONE]\n\n", more=False)

    async def _body(self, text: str, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": text.encode(), "more_body": more})
