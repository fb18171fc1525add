"""Answers: one at a time, a few requests wait; whole or streamed, in OpenAI's form.

What the tokenizer and the model do happens in the turn of one request, since neither takes two
threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
from anyio import to_thread
from starlette.responses import JSONResponse

from app.evaluation.conversation import Reply, Responder
from app.process.errors import UserError
from app.serving.address import ServeConfig
from app.serving.requests import SERVER_FAILED, ChatRequest, RequestError, print_failure
from data_modules import DataError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


class Answers:
    """Answer requests, one at a time; a few wait, and the next is refused."""

    def __init__(self, responder: Responder, config: ServeConfig, model: str) -> None:
        self._responder, self._config, self._model = responder, config, model
        self._turn = asyncio.Lock()
        self._num_waiting = 0

    def response(self, request: ChatRequest, arrived: float) -> ASGIApp:
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
                    body = await self._answer_in_time(request, arrived, stream)
                except RequestError as error:
                    if not stream.is_open:
                        await JSONResponse(error.body, error.status, error.headers)(
                            scope, receive, send
                        )
                    else:
                        await stream.write(error.body)
                else:
                    if not stream.is_open:
                        await JSONResponse(body)(scope, receive, send)
                if stream.is_open:
                    await stream.close()
                group.cancel_scope.cancel()

        return respond

    async def _answer_in_time(
        self, request: ChatRequest, arrived: float, stream: EventStream
    ) -> dict[str, Any]:
        """Wait for the turn of a request and answer it; RequestError for all that goes wrong."""
        left = self._config.timeout_seconds - (time.monotonic() - arrived)
        try:
            with anyio.fail_after(max(left, 0)):
                async with self._in_turn():
                    return await self._answer(request, stream)
        except RequestError:
            raise
        except TimeoutError:
            seconds = f"{self._config.timeout_seconds:g}"
            message = f"no whole answer within {seconds} seconds (serve.timeout_seconds)"
            raise RequestError(message, status=503, code="timeout") from None
        except Exception as error:
            print_failure(error)
            raise RequestError(SERVER_FAILED, status=500) from error

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

    async def _answer(self, request: ChatRequest, stream: EventStream) -> dict[str, Any]:
        """Write an answer to `stream` where that was asked for; returns the whole one."""
        started = time.monotonic()
        try:
            ids = await to_thread.run_sync(self._responder.prompt_ids, request.turns)
        except UserError as error:
            code = "context_length_exceeded"
            raise RequestError(str(error), "messages", code=code) from error
        except DataError as error:
            raise RequestError(f"messages: {error}", "messages") from error
        reply = Reply(ids)
        pieces = self._responder.answer(
            reply, request.how, stop_texts=request.stop_texts, seed=request.seed
        )
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time())}
        whole = Completion(head | {"model": self._model}, reply)
        text: list[str] = []
        try:
            if request.is_stream:
                await stream.write(whole.chunk({"role": "assistant", "content": ""}))
            while (piece := await to_thread.run_sync(next, pieces, None)) is not None:
                text.append(piece)
                if request.is_stream and piece:
                    await stream.write(whole.chunk({"content": piece}))
        finally:
            # Also when the client has gone: the thread that generates ends at its next token.
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(pieces.close)
        if request.is_stream:
            await stream.write(whole.chunk({}, ends=True))
            if request.has_usage:
                await stream.write(whole.chunk(None))
        _print_answered(reply, time.monotonic() - started)
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


def _print_answered(reply: Reply, seconds: float) -> None:
    print(
        f"answered: {len(reply.prompt_ids):,} + {reply.num_tokens:,} tokens in {seconds:.2f} s",
        flush=True,
    )
