"""The web server: routes, access control and error responses, on uvicorn in one process.

A request is allowed by its Host and Origin headers and the API key, then parsed and validated,
before it waits for its turn.
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
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from app.evaluation.conversation import ConversationConfig, Responder
from app.process.launch import is_loopback
from app.process.signals import exit_after_grace, signal_received
from app.serving.address import ServeConfig
from app.serving.completions import CompletionQueue
from app.serving.requests import (
    INTERNAL_ERROR,
    RequestError,
    check_no_control_tokens,
    parse_chat_request,
    parse_json,
    parse_text_request,
    print_error,
)
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
    config: ServeConfig,
    defaults: ConversationConfig,
    model: str,
    key: str | None = None,
) -> ASGIApp:
    """Build the application: the page, `/v1/models`, the two kinds of completions and `/health`.

    `model` is the name that requests must use; `key` is the API key, None if none is required.
    """
    page = PAGE.read_text(encoding="utf-8")
    completions = CompletionQueue(responder, config, model)
    model_card = {"id": model, "object": "model", "created": int(time.time()), "owned_by": "loft"}

    async def show_page(request: Request) -> Response:
        return HTMLResponse(page, headers={"content-security-policy": _page_policy(page)})

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model_card]})

    async def one_model(request: Request) -> Response:
        if request.path_params["name"] != model:
            raise RequestError(f"this server has the model {model}", "model", status=404)
        return JSONResponse(model_card)

    async def complete(request: Request) -> ASGIApp:
        arrived = time.monotonic()
        parse = parse_chat_request if "chat" in request.url.path else parse_text_request
        try:
            found = parse(parse_json(await _read_body(request)), model, defaults)
        except RecursionError as error:
            raise RequestError("the body is nested too deeply") from error
        check_no_control_tokens(found.turns, responder.control_texts)
        return completions.response(found, arrived)

    async def refuse(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            route = f"{request.method} {printable(request.url.path)[:80]}"
            error = RequestError(f"{route} is not available; {_ROUTES}", status=error.status_code)
        if not isinstance(error, RequestError):
            error = RequestError(INTERNAL_ERROR, status=500)  # `AccessMiddleware` prints the cause
        return JSONResponse(error.body, error.status, error.headers)

    app = Starlette(
        routes=[
            Route("/", show_page),
            Route("/health", health),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", one_model),
            Route("/v1/chat/completions", complete, methods=["POST"]),
            Route("/v1/completions", complete, methods=["POST"]),
        ],
        exception_handlers={RequestError: refuse, HTTPException: refuse, Exception: refuse},
    )
    app.router.redirect_slashes = False
    return AccessMiddleware(app, config.host, key)


def _page_policy(page: str) -> str:
    """Return a Content-Security-Policy: the page's own script and style, and this server."""
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
    """Return the body of a JSON request; raise RequestError if it is too long or too slow."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise RequestError("Content-Type: expected application/json", status=415)
    too_long = RequestError(f"the body is longer than {MAX_BODY:,} bytes", status=413)
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
        raise RequestError(
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
            body = json.dumps(RequestError(msg).body).encode()
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


class AccessMiddleware:
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
        except RequestError as error:
            refusal = JSONResponse(error.body, error.status, error.headers)
            await refusal(scope, receive, send_with_headers)
        except ClientDisconnect:
            pass
        except Exception as error:  # noqa: BLE001  the response was sent; keep serving
            print_error(error)

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
            raise RequestError("Origin: requests from other sites are refused", status=403)
        if self._key is None or not scope["path"].startswith("/v1"):
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # Digests of equal length, so that the time of the comparison reveals nothing about the key.
        digests = [
            hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
            for key in (given.strip(), self._key)
        ]
        if scheme.lower() != "bearer" or not hmac.compare_digest(*digests):
            raise RequestError(
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
