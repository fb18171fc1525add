"""A local HTTP server that replaces an internet service during a test."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Handler(http.server.BaseHTTPRequestHandler):
    """Base class of request handlers; logs nothing."""

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def local_server(handler: type[Handler]) -> Iterator[str]:
    """Serve `handler`, with a thread for each request; yield the server's URL."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    # Shutdown waits for the next poll, by default half a second.
    options = {"poll_interval": 0.01}
    threading.Thread(target=server.serve_forever, kwargs=options, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
