"""The HTTP server: uvicorn in one process, with loft's signal handling and JSON error responses.

Access control of each request: the Host and Origin headers and the API key.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import json
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import uvicorn
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from app.process.launch import is_loopback
from app.process.signals import exit_after_grace, signal_received
from app.serving.requests import RequestError, print_error
from common.text import printable

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER_SECONDS = 15.0
"""time limit for receiving the headers of a request, in seconds"""
MAX_CONNECTIONS = 256
STOP_SECONDS = 1
"""grace period of running requests when the server stops, in seconds"""
NO_SNIFFING = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}


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
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=STOP_SECONDS,
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
                extra = [(name.encode(), value.encode()) for name, value in NO_SNIFFING.items()]
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
