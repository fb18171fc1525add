"""The server's settings, API key and listening socket.

Imports no web framework: `--help` and the first checks must not wait for one.
"""

from __future__ import annotations

import errno
import os
import socket
from dataclasses import dataclass

from app.process.launch import is_loopback
from common.errors import UserError
from common.facts import setting

KEY_VARIABLE = "LOFT_SERVE_KEY"


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


def read_key(config: ServeConfig) -> str | None:
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


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
