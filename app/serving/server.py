"""The HTTP server: uvicorn in one process, with loft's signal handling and JSON error responses."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from app.process.signals import exit_after_grace, signal_received
from app.serving.requests import RequestError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

HEADER_SECONDS = 15.0
"""time limit for receiving the headers of a request, in seconds"""
MAX_CONNECTIONS = 256
STOP_SECONDS = 1
"""grace period of running requests when the server stops, in seconds"""


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
