"""One request from its acceptance to the last byte: in one object, or as a stream of events."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from heavywater.errors import HeavywaterError
from heavywater.http.answer import Answer, Piece
from heavywater.http.errors import ApiError, of_server
from heavywater.http.options import HttpOptions
from heavywater.http.shapes import Shape

_FAREWELL_S = 2.0  # for an error to be read
_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that gathers the events would keep them from who waits
]


@dataclass
class Running:
    """How many answers are under way."""

    limit: int
    count: int = 0

    def admit(self, number: int) -> None:
        """Raises ApiError where they would be too many; leave() takes them out again."""
        if self.count + number > self.limit:
            message = f"{self.count} answers are under way, {number} more would exceed the limit of {self.limit}"
            raise ApiError(429, message, "rate_limit_error", code="too_many_requests")
        self.count += number

    def leave(self, number: int) -> None:
        self.count -= number


class AnswerResponse(Response):
    """Writes an answer. Ends its generations when the client goes, or takes too long."""

    def __init__(self, answer: Answer, shape: Shape, options: HttpOptions, running: Running) -> None:
        super().__init__()
        self._answer = answer
        self._shape = shape
        self._options = options
        self._running = running
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        number = self._shape.asked.num_choices
        try:
            self._running.admit(number)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        try:
            await self._until_gone(scope, receive, send)
        finally:
            self._running.leave(number)

    async def _until_gone(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._respond(scope, receive, send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._options.request_timeout_s):
                async with self._answer as answer:
                    if self._shape.asked.stream:
                        await self._stream(answer, send)
                        return
                    pieces = [piece async for piece in answer.pieces(self._options.keepalive_s) if piece is not None]
                self._started = True
                await JSONResponse(self._shape.whole(pieces))(scope, receive, send)
        except HeavywaterError as error:
            await self._fail(of_server(error), scope, receive, send)
        except TimeoutError:
            message = f"no whole answer in {self._options.request_timeout_s:g} s"
            await self._fail(ApiError(504, message, "server_error", code="timeout"), scope, receive, send)

    async def _stream(self, answer: Answer, send: Send) -> None:
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
        await self._events(send, self._shape.opening())
        last: list[Piece] = []
        async for piece in answer.pieces(self._options.keepalive_s):
            if piece is None:
                await _write(send, ": waiting\n\n")
                continue
            if piece.finish_reason is not None:
                last.append(piece)
            await self._events(send, self._shape.chunks(piece))
        if self._shape.asked.include_usage:
            await self._events(send, [self._shape.usage_chunk(last)])
        await _write(send, self._shape.farewell, more=False)

    async def _events(self, send: Send, objects: Sequence[dict[str, object]]) -> None:
        if objects:
            await _write(send, "".join(map(_event, objects)))

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        """A stream that has begun cannot change its status: it ends with the error, and without [DONE]."""
        # Nor is a client waited for that reads no more: what is not taken is lost with the connection.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FAREWELL_S):
                if not self._started:
                    await error.response()(scope, receive, send)
                elif self._shape.asked.stream:
                    await _write(send, f"data: {json.dumps(error.body())}\n\n", more=False)


def _event(one: dict[str, object]) -> str:
    name = f"event: {one['type']}\n" if "type" in one else ""
    return f"{name}data: {json.dumps(one)}\n\n"


async def _write(send: Send, text: str, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": more})


async def _disconnected(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
