"""The stream of a Generate call, for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import TracebackType
from typing import Any

from heavywater.errors import HeavywaterError, translated
from heavywater.generation import GenerationState, Token
from heavywater.v1 import generation_pb2


class Generation(GenerationState):
    """Iterates over the tokens; cancels the call when left early. As heavywater.Generation, for one task at a time.

    async with client.generate("Once", max_new_tokens=32) as generation:
        async for token in generation:
            print(token.text, end="")
    print(generation.summary.finish_reason)
    """

    def __init__(
        self,
        generate: Callable[[generation_pb2.GenerateRequest], Any],
        request: generation_pb2.GenerateRequest,
        resume_timeout_s: float,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`generate` opens a call; on the thread of the event loop."""
        super().__init__(request, resume_timeout_s)
        self._generate = generate
        self._sleep = sleep
        self._call = generate(request)

    async def __aiter__(self) -> AsyncIterator[Token]:
        while True:
            try:
                with self._translated():
                    async for response in self._call:
                        if (token := self._take(response)) is not None:
                            yield token
                return
            except HeavywaterError as error:
                await self._sleep(self._next_attempt(error))
            self._call = self._generate(self._request())

    async def wait_accepted(self) -> int:
        """Waits until the request is accepted, which is before its prompt is computed; returns the
        sequence's id, 0 when the stream ended without naming one. To be called before the tokens are read."""
        with self._translated():
            async for response in self._call:  # the first names the sequence, and has no token
                self._sequence_id = response.sequence_id
                break
        return self._sequence_id

    async def text(self) -> str:
        """Reads to the end; returns the text."""
        return "".join([token.text async for token in self])

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """A call that cancel() ended looks to gRPC's reader like a cancelled task: it is none."""
        try:
            with translated():
                yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._cancelled or (task is not None and task.cancelling()):
                raise
            raise HeavywaterError("CANCELLED", "the generation was cancelled") from None
