"""Who may use the server: by its own address, from its own page, with its key."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from app.process.launch import is_loopback
from app.serving.requests import RequestError, print_failure
from data_modules import printable

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

NO_SNIFFING = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}


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
            refusal = JSONResponse(error.body, error.status, error.headers)
            await refusal(scope, receive, watched)
        except ClientDisconnect:
            pass
        except Exception as error:  # noqa: BLE001  answered already; the server goes on
            print_failure(error)

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
