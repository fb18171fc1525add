"""A server on this machine that stands for one of the internet, for as long as a test asks it."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Handler(http.server.BaseHTTPRequestHandler):
    """Answer by what a class made of it does; nothing is printed of a request."""

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def local_server(handler: type[Handler]) -> Iterator[str]:
    """Give the address at which `handler` answers, a thread each request."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    # It sees that it is to end where it polls; half a second is what it is left at.
    polls = {"poll_interval": 0.01}
    threading.Thread(target=server.serve_forever, kwargs=polls, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
