"""The server: its address, who may ask it, its limits, and one answer at a time.

Starlette and uvicorn speak HTTP. A request is checked in full before it waits for its turn; what
the tokenizer and the model do happens in the turn of one request, since neither takes two threads.
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
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
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
from app.process.errors import UserError
from app.process.signals import exit_after_grace, signal_received
from app.serving.address import ServeConfig, is_loopback
from app.serving.requests import (
    ChatRequest,
    RequestError,
    check_contents,
    read_chat,
    read_json,
)
from data_modules import DataError, printable, redact

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY, MAX_DISCARDED = 2**20, 2**24
"""bytes of a request, and of one that is read to its end before it is refused: a client that still
writes sees no answer"""
BODY_SECONDS, HEADER_SECONDS = 30.0, 15.0
"""that a client may take to send them"""
MAX_CONNECTIONS = 256
STOP_SECONDS = 1
"""that answers have to end by themselves when the server stops"""
PAGE = Path(__file__).with_name("chat.html")
NO_SNIFFING = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}


class Protocol(H11Protocol):
    """Malformed HTTP is answered as all else is; a connection that asks nothing is closed."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(HEADER_SECONDS, self._close_unused)

    def _close_unused(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        if self.cycle is None or self.cycle.response_complete:
            body = json.dumps(RequestError(msg).body).encode()
            self.transport.write(
                b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
                b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
            )
        self.transport.close()


class Server(uvicorn.Server):
    """Signals are handled by the process (`install_signal_handlers`), and looked for here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def on_tick(self, counter: int) -> bool:
        if signal_received() is not None:
            exit_after_grace()
            self.should_exit = True
        return await super().on_tick(counter)


def build_server(app: ASGIApp) -> uvicorn.Server:
    """Build what serves `app` until a signal comes: `server.run([listener])`."""
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
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=STOP_SECONDS,
        )
    )


def build_app(
    responder: Responder,
    config: ServeConfig,
    defaults: ConversationConfig,
    model: str,
    key: str | None = None,
) -> ASGIApp:
    """Build the application: the page, `/v1/models`, `/v1/chat/completions`, `/health`."""
    page = PAGE.read_text(encoding="utf-8")
    answers = Answers(responder, config, model)
    about = {"id": model, "object": "model", "created": int(time.time()), "owned_by": "loft"}

    async def show_page(request: Request) -> Response:
        return HTMLResponse(page, headers={"content-security-policy": page_policy(page)})

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [about]})

    async def one_model(request: Request) -> Response:
        if request.path_params["name"] != model:
            raise RequestError(f"this server has {model}", "model", status=404)
        return JSONResponse(about)

    async def complete_chat(request: Request) -> ASGIApp:
        arrived = time.monotonic()
        try:
            asked = read_chat(read_json(await _read_body(request)), model, defaults)
        except RecursionError as error:
            raise RequestError("the body is nested too deeply") from error
        check_contents(asked.turns, responder.control_texts)
        return answers.response(asked, arrived)

    async def refuse(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            where = f"{request.method} {printable(request.url.path)[:80]}"
            error = RequestError(f"{where}: {error.detail}", status=error.status_code)
        return _as_response(error if isinstance(error, RequestError) else _failed())

    app = Starlette(
        routes=[
            Route("/", show_page),
            Route("/health", health),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", one_model),
            Route("/v1/chat/completions", complete_chat, methods=["POST"]),
        ],
        exception_handlers={RequestError: refuse, HTTPException: refuse, Exception: refuse},
    )
    app.router.redirect_slashes = False
    return AccessCheck(app, config.host, key)


def page_policy(page: str) -> str:
    """Return the Content-Security-Policy of a page: its own script and style, and this server."""
    allowed = [
        "'sha256-" + base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode() + "'"
        for tag in ("script", "style")
        for inside in re.findall(f"<{tag}>(.*?)</{tag}>", page, re.S)
    ]
    return (
        f"default-src 'none'; script-src {allowed[0]}; style-src {allowed[1]}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class AccessCheck:
    """Let in who asks for this address by its name, from its own page, with the key.

    A page of another site that has its name point to this machine (DNS rebinding) sends that name
    as Host; one that sends a form here says where it comes from by Origin.
    """

    def __init__(self, app: ASGIApp, host: str, key: str | None) -> None:
        self._app, self._host, self._key = app, host, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer why not."""
        if scope["type"] != "http":
            return

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.encode(), value.encode()) for name, value in NO_SNIFFING.items()]
                message["headers"] = [*message.get("headers", []), *extra]
            await send(message)

        try:
            self._check(scope)
            await self._app(scope, receive, watched)
        except RequestError as error:
            await _as_response(error)(scope, receive, watched)
        except ClientDisconnect:
            pass
        except Exception as error:  # noqa: BLE001  answered already; the server goes on
            _tell(error)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_own(hosts[0]):
            raise RequestError(
                f"Host: {printable(', '.join(hosts))[:80]} is not an address of this server",
                status=403,
            )
        origin = headers.get("origin")
        if origin is not None and origin not in (f"http://{hosts[0]}", f"https://{hosts[0]}"):
            raise RequestError("Origin: pages of other sites may not ask this server", status=403)
        if self._key is None or not scope["path"].startswith("/v1"):
            return
        kind, _, typed = headers.get("authorization", "").partition(" ")
        # Digests have one length, and their comparison takes one time.
        digests = [
            hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
            for key in (typed.strip(), self._key)
        ]
        if kind.lower() != "bearer" or not hmac.compare_digest(*digests):
            raise RequestError(
                "Authorization: Bearer KEY, with the key that this server was started with",
                status=401,
                code="invalid_api_key",
            )

    def _is_own(self, host: str) -> bool:
        """Tell whether a Host header names this machine: by address, or as it was typed.

        The port is left out, since a tunnel may have another one.
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
        # An address is no name that somebody else could point here.
        return address.is_loopback or not is_loopback(self._host)


class Answers:
    """Answer requests, one at a time; a few wait, and the next is refused."""

    def __init__(self, responder: Responder, config: ServeConfig, model: str) -> None:
        self._responder, self._config, self._model = responder, config, model
        self._turn = asyncio.Lock()
        self._num_waiting = 0

    def response(self, asked: ChatRequest, arrived: float) -> ASGIApp:
        """Return what answers a request, and stops when its client has gone."""

        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            async with anyio.create_task_group() as group:

                async def watch() -> None:
                    while (await receive())["type"] != "http.disconnect":
                        pass
                    group.cancel_scope.cancel()

                group.start_soon(watch)
                stream = EventStream(send)
                try:
                    body = await self._answer_in_time(asked, arrived, stream)
                except RequestError as error:
                    if not stream.is_open:
                        await _as_response(error)(scope, receive, send)
                    else:
                        await stream.write(error.body)
                else:
                    if not stream.is_open:
                        await _as_json(body)(scope, receive, send)
                if stream.is_open:
                    await stream.close()
                group.cancel_scope.cancel()

        return respond

    async def _answer_in_time(
        self, asked: ChatRequest, arrived: float, stream: EventStream
    ) -> dict[str, Any]:
        """Wait for the turn of a request and answer it; RequestError for all that goes wrong."""
        left = self._config.timeout_seconds - (time.monotonic() - arrived)
        try:
            with anyio.fail_after(max(left, 0)):
                async with self._in_turn():
                    return await self._answer(asked, stream)
        except RequestError:
            raise
        except TimeoutError:
            seconds = f"{self._config.timeout_seconds:g}"
            message = f"no whole answer within {seconds} seconds (serve.timeout_seconds)"
            raise RequestError(message, status=503, code="timeout") from None
        except Exception as error:
            _tell(error)
            raise _failed() from error

    @contextlib.asynccontextmanager
    async def _in_turn(self) -> AsyncIterator[None]:
        if self._turn.locked() and self._num_waiting >= self._config.max_waiting:
            raise RequestError(
                f"{self._num_waiting} requests wait already; ask again later",
                status=503,
                code="overloaded",
            )
        self._num_waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self._num_waiting -= 1
        try:
            yield
        finally:
            self._turn.release()

    async def _answer(self, asked: ChatRequest, stream: EventStream) -> dict[str, Any]:
        """Write an answer to `stream` where that was asked for; returns the whole one."""
        began = time.monotonic()
        try:
            ids = await to_thread.run_sync(self._responder.prompt_ids, asked.turns)
        except UserError as error:
            code = "context_length_exceeded"
            raise RequestError(str(error), "messages", code=code) from error
        except DataError as error:
            raise RequestError(f"messages: {error}", "messages") from error
        reply = Reply(ids)
        pieces = self._responder.answer(
            reply, asked.how, stop_texts=asked.stop_texts, seed=asked.seed
        )
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time())}
        whole = Completion(head | {"model": self._model}, reply)
        text: list[str] = []
        try:
            if asked.is_stream:
                await stream.write(whole.chunk({"role": "assistant", "content": ""}))
            while (piece := await to_thread.run_sync(next, pieces, None)) is not None:
                text.append(piece)
                if asked.is_stream and piece:
                    await stream.write(whole.chunk({"content": piece}))
        finally:
            # Also when the client has gone: the thread that generates ends at its next token.
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(pieces.close)
        if asked.is_stream:
            await stream.write(whole.chunk({}, ends=True))
            if asked.has_usage:
                await stream.write(whole.chunk(None))
        _log(reply, time.monotonic() - began)
        return whole.body("".join(text))


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion as OpenAI writes it."""

    head: Mapping[str, Any]
    reply: Reply

    @property
    def usage(self) -> dict[str, int]:
        """The tokens of prompt and answer."""
        prompt, answer = len(self.reply.prompt_ids), self.reply.num_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
        }

    @property
    def reason(self) -> str:
        """Why it ended: `stop` as the model or a stop text had it, `length` by the limit."""
        return "stop" if self.reply.is_finished else "length"

    def body(self, text: str) -> dict[str, Any]:
        """Return the whole answer."""
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": self.reason}
        kind = {"object": "chat.completion"}
        return {**self.head, **kind, "choices": [choice], "usage": self.usage}

    def chunk(self, delta: Mapping[str, Any] | None, *, ends: bool = False) -> dict[str, Any]:
        """Return a part of a streamed answer; without a delta the one that has the usage."""
        kind = {"object": "chat.completion.chunk"}
        if delta is None:
            return {**self.head, **kind, "choices": [], "usage": self.usage}
        choice = {"index": 0, "delta": delta, "finish_reason": self.reason if ends else None}
        return {**self.head, **kind, "choices": [choice]}


class EventStream:
    """Send server-sent events, the status and the headers before the first of them."""

    def __init__(self, send: Send) -> None:
        self._send, self.is_open = send, False

    async def write(self, event: Mapping[str, Any]) -> None:
        """Send one event."""
        if not self.is_open:
            headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            self.is_open = True
        await self._body(f"data: {json.dumps(event)}\n\n", more=True)

    async def close(self) -> None:
        """Send the last event, and end."""
        await self._body("data: [DONE]\n\n", more=False)

    async def _body(self, text: str, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": text.encode(), "more_body": more})


async def _read_body(request: Request) -> bytes:
    """Return the body of a JSON request; RequestError where it is too long or too slow."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError("Content-Type: application/json is what this server reads", status=415)
    too_long = RequestError(f"the body has more than {MAX_BODY:,} bytes", status=413)
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > MAX_DISCARDED:
        raise too_long
    body, size = bytearray(), 0
    try:
        with anyio.fail_after(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > MAX_DISCARDED:
                    raise too_long
                if size <= MAX_BODY:
                    body += part
    except TimeoutError:
        raise RequestError(
            f"the body did not come within {BODY_SECONDS:g} seconds", status=408
        ) from None
    if size > MAX_BODY:
        raise too_long
    return bytes(body)


def _as_response(error: RequestError) -> Response:
    headers = {"retry-after": "5"} if error.status == 503 else {}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return _as_json(error.body, error.status, headers)


def _as_json(
    body: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return JSONResponse(body, status, headers)


def _failed() -> RequestError:
    return RequestError("the server failed; its terminal says why", status=500)


def _tell(error: Exception) -> None:
    said = printable(redact(f"{type(error).__name__}: {error}"))
    print(f"error while answering: {said}", file=sys.stderr)


def _log(reply: Reply, seconds: float) -> None:
    print(
        f"answered: {len(reply.prompt_ids):,} + {reply.num_tokens:,} tokens in {seconds:.2f} s",
        flush=True,
    )
