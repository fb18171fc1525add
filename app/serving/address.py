"""Where a server listens, who may ask it, and its limits: settings, the key, the socket.

Needs no server: the settings and the first checks must not wait for one.
"""

from __future__ import annotations

import errno
import os
import socket
from dataclasses import dataclass

from app.process.errors import UserError
from app.process.launch import is_loopback
from data_modules import setting

KEY_VARIABLE = "LOFT_SERVE_KEY"


@dataclass(kw_only=True, slots=True)
class ServeConfig:
    engine: str = setting("loft", choices=("loft", "vllm"), shown=True)
    """loft = this server; vllm = print the line that starts vLLM with what was trained, in an
    environment of its own, and end"""
    host: str = setting("127.0.0.1", shown=True)
    """address to listen at; any but this machine's own loopback needs a key in the environment,
    LOFT_SERVE_KEY"""
    port: int = setting(8000, ge=0, le=65535, shown=True)
    """0 = any free one, which is printed"""
    model_name: str | None = setting(None, aliases=("served_model_name",))
    """what clients call the model; null = the name of the run, or of the base's folder"""
    max_waiting: int = setting(16, ge=0, le=1024)
    """requests that wait while one is answered; those beyond are refused (503)"""
    timeout_seconds: float = setting(300.0, gt=0, le=86_400)
    """seconds of a request from its arrival to the end of its answer"""


def read_key(config: ServeConfig) -> str | None:
    """Return the key that clients must have, from the environment; UserError where one is needed.

    It is never a setting: those are printed and written.
    """
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if key:
        return key
    if not is_loopback(config.host):
        raise UserError(
            f"serve.host={config.host}: whoever reaches that address could use the model; set a "
            f"key in the environment ({KEY_VARIABLE}=... before the command), or leave serve.host "
            "out (127.0.0.1)"
        )
    return None


def bind(config: ServeConfig) -> socket.socket:
    """Take the address, so that nobody else does while the model loads; UserError where taken."""
    where = f"serve.host={config.host} serve.port={config.port}"
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Connections are taken once the model is loaded; a second server is refused from now on.
        listener.listen(128)
    except (OSError, UnicodeError) as error:
        if listener is not None:
            listener.close()
        code = getattr(error, "errno", None)
        if code == errno.EADDRINUSE:
            fix = "another program listens there; type another serve.port, or 0 for any free one"
        elif code == errno.EACCES:
            fix = "ports below 1024 need rights; type serve.port=8000"
        else:
            fix = f"this machine has no such address ({error}); type serve.host=127.0.0.1"
        raise UserError(f"{where}: {fix}") from error
    return listener


def address_of(listener: socket.socket) -> str:
    """Return the URL of a socket that listens."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
