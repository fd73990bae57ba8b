"""Chats whose last answer's sequence is kept for a while, so that the next question goes on with it: the conversation
is not computed anew."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from heavywater.aio import Client, Generation
from heavywater.chat_turns import Held
from heavywater.errors import HeavywaterError
from heavywater.generation import Token
from heavywater.http.asked import Asked, Prompt

_REPORT_S = 1.0  # for the ranks' last reports to arrive
_POLL_S = 0.05
# What a sequence that cannot go on is refused with: the conversation is computed as a whole.
COMPUTE_ANEW = ("NOT_FOUND", "FAILED_PRECONDITION", "INVALID_ARGUMENT", "OUT_OF_RANGE", "ABORTED", "DATA_LOSS")


@dataclass(frozen=True)
class Turn:
    """The sequence that holds a conversation so far, and what is new."""

    held: Held
    rest: str


@dataclass
class _Entry:
    owner: tuple[str, bytes]
    text: str
    sequence_id: int
    held: asyncio.Task[Held | None]  # None: it cannot go on, and is closed
    expires_s: float


class Turns:
    """A table of `limit` conversations, the longest unused out first; each for `keep_s` and for one tenant and policy.
    Belongs to one event loop."""

    def __init__(
        self,
        client: Client,
        encode: Callable[[str], list[int]],
        limit: int,
        keep_s: float,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._encode = encode
        self._limit = limit
        self._keep_s = keep_s
        self._now_s = now_s
        self._entries: list[_Entry] = []  # the longest unused first
        self._work: set[asyncio.Task[Any]] = set()

    @property
    def count(self) -> int:
        return len(self._entries)

    def serves(self, asked: Asked) -> bool:
        """One answer to a chat, whose sequence is nobody else's."""
        return asked.is_chat and asked.n == 1 and not asked.keep and self._client.has_cache

    async def take(self, asked: Asked, prompt: Prompt) -> Turn | None:
        """The longest conversation of this owner that `prompt` goes on with. It is the caller's from now on."""
        self._expire()
        if not isinstance(prompt, str) or not self.serves(asked):
            return None
        owner = _owner(asked)
        found = [one for one in self._entries if one.owner == owner and prompt.startswith(one.text)]
        if not found:
            return None
        entry = max(found, key=lambda one: len(one.text))
        self._entries.remove(entry)
        held = await entry.held
        if held is None:
            return None
        rest = held.rest_of(prompt, self._encode)
        if rest:
            return Turn(held, rest)
        self.drop(held.sequence_id)  # better computed anew
        return None

    def keep(self, asked: Asked, text: str, generation: Generation, last: Token) -> None:
        """After a whole answer that ended with the token `last`; `text`: prompt and answer. The sequence is the table's
        from now on."""
        self._expire()
        held = self._run(self._hold(text, generation, last))
        expires_s = self._now_s() + self._keep_s
        self._entries.append(_Entry(_owner(asked), text, generation.sequence_id, held, expires_s))
        while len(self._entries) > self._limit:
            self._end(self._entries.pop(0))

    def put_back(self, asked: Asked, turn: Turn) -> None:
        """What take() gave and the server did not accept just now (it is full, or away)."""

        async def as_it_was() -> Held | None:
            return turn.held

        expires_s = self._now_s() + self._keep_s
        held = turn.held
        self._entries.append(_Entry(_owner(asked), held.text, held.sequence_id, self._run(as_it_was()), expires_s))

    def drop(self, sequence_id: int) -> None:
        """Closes a sequence that take() gave and that cannot go on."""
        self._run(self._close(sequence_id))

    async def finish(self) -> None:
        """Closes all of them."""
        entries, self._entries = self._entries, []
        for entry in entries:
            self._end(entry)
        while self._work:
            await asyncio.gather(*self._work, return_exceptions=True)

    async def _hold(self, text: str, generation: Generation, last: Token) -> Held | None:
        summary = generation.summary
        with contextlib.suppress(HeavywaterError):  # a policy without states to go on from, say
            sequence = await self._reported(generation.sequence_id, round(summary.counts.tokens_seen))
            if sequence is not None:
                await self._client.suspend(generation.sequence_id, self._keep_s)
                # The last token was not taken in; one that ends the answer is part of what the template puts there.
                tokens = [*sequence.tokens] + ([] if summary.finish_reason == "eos" else [last.token])
                return Held(generation.sequence_id, text, tokens, sequence.prompt_tokens)
        await self._close(generation.sequence_id)
        return None

    async def _reported(self, sequence_id: int, num_tokens: int) -> Any:
        deadline_s = self._now_s() + _REPORT_S
        while True:
            sequence = await self._client.get(sequence_id)
            if len(sequence.tokens) == num_tokens and sequence.finished:
                return sequence
            if self._now_s() > deadline_s:
                return None
            await asyncio.sleep(_POLL_S)

    def _expire(self) -> None:
        now_s = self._now_s()
        for entry in [one for one in self._entries if one.expires_s <= now_s]:
            self._entries.remove(entry)
            self._end(entry)

    def _end(self, entry: _Entry) -> None:
        async def end() -> None:
            if await entry.held is not None:
                await self._close(entry.sequence_id)

        self._run(end())

    async def _close(self, sequence_id: int) -> None:
        with contextlib.suppress(HeavywaterError):  # the server may have ended it, or be gone
            await self._client.close(sequence_id)

    def _run(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task


def _owner(asked: Asked) -> tuple[str, bytes]:
    """Whose it is and how it is kept: sequences of one policy do not go on with another."""
    policy = asked.policy.SerializeToString(deterministic=True) if asked.policy is not None else b""
    return asked.tenant, policy
