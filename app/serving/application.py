"""The web application: routes of the page and the API, and error responses.

A request is parsed and validated before it waits for its turn.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from app.evaluation.conversation import ConversationConfig, Responder
from app.serving.address import ServeConfig
from app.serving.completions import CompletionQueue
from app.serving.requests import (
    INTERNAL_ERROR,
    RequestError,
    check_no_control_tokens,
    parse_chat_request,
    parse_json,
    parse_text_request,
)
from app.serving.server import AccessMiddleware
from common.text import printable

if TYPE_CHECKING:
    from starlette.types import ASGIApp

MAX_BODY = 2**20
"""maximum size of a request body, in bytes"""
MAX_DISCARDED = 2**24
"""size up to which a body that is too long is read to its end, in bytes: many clients see no
response while they are still sending"""
ROUTES = (
    "this server has POST /v1/chat/completions and /v1/completions, and GET /v1/models, /health "
    "and /"
)
BODY_SECONDS = 30.0
"""time limit for receiving the body of a request, in seconds"""
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
        return HTMLResponse(page, headers={"content-security-policy": page_policy(page)})

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
            error = RequestError(f"{route} is not available; {ROUTES}", status=error.status_code)
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


def page_policy(page: str) -> str:
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
            f"the body was not received within {BODY_SECONDS:g} seconds", status=408
        ) from None
    if size > MAX_BODY:
        raise too_long
    return bytes(body)
