"""Completions in OpenAI's formats, generated one at a time; a few requests may wait.

Tokenizer and model are used only by the request that holds the lock: neither is thread-safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio
from anyio import to_thread
from starlette.responses import JSONResponse

from app.evaluation.conversation import Reply, Responder
from app.serving.address import ServeConfig
from app.serving.requests import INTERNAL_ERROR, CompletionRequest, RequestError, print_error
from common.errors import DataError, UserError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


class CompletionQueue:
    """Answer one request at a time; refuse further requests if too many are waiting."""

    def __init__(self, responder: Responder, config: ServeConfig, model: str) -> None:
        self._responder, self._config, self._model = responder, config, model
        self._lock = asyncio.Lock()
        self._num_waiting = 0

    def response(self, request: CompletionRequest, arrived: float) -> ASGIApp:
        """Return the ASGI response to a request; it stops generating if the client disconnects.

        `arrived` is the time of arrival by `time.monotonic`.
        """

        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            async with anyio.create_task_group() as group:

                async def cancel_on_disconnect() -> None:
                    while (await receive())["type"] != "http.disconnect":
                        pass
                    group.cancel_scope.cancel()

                group.start_soon(cancel_on_disconnect)
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
        self, request: CompletionRequest, arrived: float, stream: EventStream
    ) -> dict[str, Any]:
        """Answer a request when its turn comes; raise RequestError on timeout or failure."""
        left = self._config.timeout_seconds - (time.monotonic() - arrived)
        try:
            with anyio.fail_after(max(left, 0)):
                async with self._wait_for_turn():
                    return await self._answer(request, stream)
        except RequestError:
            raise
        except TimeoutError:
            seconds = f"{self._config.timeout_seconds:g}"
            message = f"answer not complete within {seconds} seconds (serve.timeout_seconds)"
            raise RequestError(message, status=503, code="timeout") from None
        except Exception as error:
            print_error(error)
            raise RequestError(INTERNAL_ERROR, status=500) from error

    @contextlib.asynccontextmanager
    async def _wait_for_turn(self) -> AsyncIterator[None]:
        if self._lock.locked() and self._num_waiting >= self._config.max_waiting:
            raise RequestError(
                f"the server is busy and {self._num_waiting} requests are waiting; retry later",
                status=503,
                code="overloaded",
            )
        self._num_waiting += 1
        try:
            await self._lock.acquire()
        finally:
            self._num_waiting -= 1
        try:
            yield
        finally:
            self._lock.release()

    async def _answer(self, request: CompletionRequest, stream: EventStream) -> dict[str, Any]:
        """Generate an answer, stream it if requested, and return the full response body."""
        started = time.monotonic()
        try:
            ids = await to_thread.run_sync(
                self._responder.prompt_ids, request.turns or request.text
            )
        except UserError as error:
            code = "context_length_exceeded"
            name = "messages" if request.is_chat else "prompt"
            raise RequestError(str(error), name, code=code) from error
        except DataError as error:
            raise RequestError(f"messages: {error}", "messages") from error
        reply = Reply(ids)
        pieces = self._responder.answer(
            reply, request.sampling, stop_texts=request.stop_texts, seed=request.seed
        )
        completion = Completion(self._model, reply, request.is_chat)
        text: list[str] = []
        try:
            if request.is_stream and request.is_chat:
                await stream.write(completion.chunk(role="assistant"))
            while (piece := await to_thread.run_sync(next, pieces, None)) is not None:
                text.append(piece)
                if request.is_stream and piece:
                    await stream.write(completion.chunk(piece))
        finally:
            # Shielded, so that generation also stops (at its next token) if the client disconnects.
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(pieces.close)
        if request.is_stream:
            await stream.write(completion.chunk(is_last=True))
            if request.include_usage:
                await stream.write(completion.usage_chunk())
        print(
            f"answered: {len(reply.prompt_ids):,} prompt + {reply.num_tokens:,} completion tokens "
            f"in {time.monotonic() - started:.2f} s",
            flush=True,
        )
        return completion.body("".join(text))


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion in OpenAI's format: the answer to a chat, or the continuation of a text."""

    model: str
    reply: Reply
    is_chat: bool
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def usage(self) -> dict[str, int]:
        prompt, answer = len(self.reply.prompt_ids), self.reply.num_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
        }

    @property
    def finish_reason(self) -> str:
        """`stop` after a stop token or stop text, `length` at the token limit."""
        return "stop" if self.reply.is_finished else "length"

    def body(self, text: str) -> dict[str, Any]:
        """Return the response body of a request without streaming."""
        message = {"role": "assistant", "content": text, "refusal": None}
        content = {"message": message} if self.is_chat else {"text": text}
        kind = "chat.completion" if self.is_chat else "text_completion"
        choice = {**content, "logprobs": None, "finish_reason": self.finish_reason}
        return self._response(kind, choice) | {"usage": self.usage}

    def chunk(self, text: str = "", *, role: str = "", is_last: bool = False) -> dict[str, Any]:
        """Return one chunk of a streamed answer; the first one of a chat has its role."""
        delta = {"role": role, "content": ""} if role else {} if is_last else {"content": text}
        content = {"delta": delta} if self.is_chat else {"text": text, "logprobs": None}
        return self._chunk({**content, "finish_reason": self.finish_reason if is_last else None})

    def usage_chunk(self) -> dict[str, Any]:
        return self._chunk() | {"usage": self.usage}

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        return self._response(
            "chat.completion.chunk" if self.is_chat else "text_completion", *choices
        )

    def _response(self, kind: str, *choices: dict[str, Any]) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": [{"index": 0, **choice} for choice in choices]}


class EventStream:
    """A stream of server-sent events; status and headers are sent before the first event."""

    def __init__(self, send: Send) -> None:
        self._send, self.is_open = send, False

    async def write(self, event: Mapping[str, Any]) -> None:
        if not self.is_open:
            headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            self.is_open = True
        await self._body(f"data: {json.dumps(event)}\n\n", more=True)

    async def close(self) -> None:
        """Send the final event and end the response."""
        await self._body("data: [DONE]\n\n", more=False)

    async def _body(self, text: str, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": text.encode(), "more_body": more})
