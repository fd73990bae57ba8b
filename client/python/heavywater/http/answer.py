"""The answers of one request: several generations at once, their pieces in the order in which they come."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from heavywater.aio import Client, Generation
from heavywater.errors import HeavywaterError
from heavywater.generation import Token
from heavywater.http.asked import Asked, Prompt
from heavywater.http.figures import figures_of
from heavywater.http.logprobs import Drawn, drawn
from heavywater.http.stops import StopMatcher
from heavywater.http.turns import COMPUTE_ANEW, Turn, Turns

# A request that is left before it is accepted: so long until it has a sequence to be closed.
_ACCEPT_S = 10.0
_QUEUED_PIECES = 64  # between the generations and who writes them out
_PROMPT_TOKENS = re.compile(r"prompt of (\d+) tokens")
_REASONS = {"length": "length", "eos": "stop", "forced": "stop"}


@dataclass(frozen=True)
class Piece:
    """What one answer has grown by. The last of each answer has a finish_reason."""

    choice: int
    text: str
    tokens: tuple[Drawn, ...] = ()  # of this piece
    finish_reason: str | None = None
    figures: dict[str, object] | None = None  # of the last piece
    prompt_tokens: int = 0  # likewise
    cached_tokens: int = 0  # of these, not computed again
    new_tokens: int = 0


class Background:
    """Work that outlives the request it belongs to, until the server ends."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def finish(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)


@dataclass
class _Choice:
    """One answer under way."""

    generation: Generation
    accepted: asyncio.Task[int]
    tokens: list[Drawn] = field(default_factory=list)  # that no piece has carried yet
    new_tokens: int = 0
    last: Token | None = None
    text: str = ""  # of all pieces, for the next turn
    whole: bool = False  # ended by itself


class Answer:
    """Context manager. Entered: all generations are accepted, or HeavywaterError says why not. Left, however:
    they have ended, and their sequences are closed (unless they are to be kept)."""

    def __init__(
        self,
        client: Client,
        asked: Asked,
        prompts: Sequence[Prompt],
        max_tokens: int,
        context_tokens: int,
        work: Background,
        turns: Turns | None = None,
    ) -> None:
        """`prompts`: each gets asked.n answers, in a row. `max_tokens`: asked.max_tokens, or what to try without it.
        `turns`: conversations that this one may go on with."""
        self._client = client
        self._asked = asked
        self._prompts = prompts
        self._max_tokens = max_tokens
        self._context_tokens = context_tokens
        self._background = work
        self._turns = turns if turns is not None and turns.serves(asked) else None
        self._turn: Turn | None = None
        self._choices: list[_Choice] = []
        self._readers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Answer:
        try:
            if not await self._go_on():
                await self._begin_anew()
        except BaseException:
            await self._leave()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leave()

    async def pieces(self, silence_s: float) -> AsyncIterator[Piece | None]:
        """Until every answer has finished; None after each `silence_s` without a piece. Raises HeavywaterError."""
        queue: asyncio.Queue[Piece | Exception] = asyncio.Queue(_QUEUED_PIECES)
        self._readers = [asyncio.create_task(self._read(index, queue)) for index in range(len(self._choices))]
        unfinished = len(self._choices)
        while unfinished:
            try:
                # Not wait_for(): in Python 3.11 it loses a cancellation that comes together with a piece.
                async with asyncio.timeout(silence_s):
                    piece = await queue.get()
            except TimeoutError:
                yield None
                continue
            if isinstance(piece, Exception):
                raise piece
            unfinished -= piece.finish_reason is not None
            yield piece

    async def _go_on(self) -> bool:
        """With the sequence of the conversation's last answer, where there is one that can."""
        if self._turns is None:
            return False
        self._turn = await self._turns.take(self._asked, self._prompts[0])
        if self._turn is None:
            return False
        try:
            await self._begin_all()
        except HeavywaterError as error:
            if error.code not in COMPUTE_ANEW:
                self._turns.put_back(self._asked, self._turn)
                raise
            await self._leave()
            self._turns.drop(self._turn.held.sequence_id)
            self._turn, self._choices = None, []
            return False
        return True

    async def _begin_anew(self) -> None:
        try:
            await self._begin_all()
        except HeavywaterError as error:
            room = self._room(error)
            if room < 1:
                raise
            await self._leave()
            self._max_tokens, self._choices = room, []
            await self._begin_all()

    async def _begin_all(self) -> None:
        """They are not cancelled with the request: what is accepted has a sequence that must be closed."""
        for prompt in self._prompts:
            for number in range(self._asked.n):
                self._choices.append(self._begin(prompt, number))
        accepted = [choice.accepted for choice in self._choices]
        done, _ = await asyncio.wait(accepted, return_when=asyncio.FIRST_EXCEPTION)
        for one in done:
            one.result()

    def _room(self, error: HeavywaterError) -> int:
        """How many new tokens the context has room for after a prompt that is refused with the server's own number
        of them; 0 where the request names one. The server counts: it has the model's tokenizer at hand."""
        if self._asked.max_tokens is not None or error.code != "OUT_OF_RANGE":
            return 0
        found = _PROMPT_TOKENS.search(error.message)
        return min(self._max_tokens - 1, self._context_tokens - int(found[1])) if found else 0

    def _begin(self, prompt: Prompt, number: int) -> _Choice:
        turn = self._turn
        generation = self._client.generate(
            turn.held.tokens if turn else prompt,
            suffix=turn.rest if turn else "",
            continues=turn.held.sequence_id if turn else 0,
            max_new_tokens=self._max_tokens,
            policy=self._asked.policy,
            temperature=self._asked.temperature,
            top_p=self._asked.top_p,
            top_k=self._asked.top_k,
            seed=(self._asked.seed + number) % 2**64,
            ignore_eos=self._asked.ignore_eos,
            return_logits=self._asked.likeliest > 0,
            tenant=self._asked.tenant,
        )
        return _Choice(generation, asyncio.create_task(generation.wait_accepted()))

    async def _read(self, index: int, queue: asyncio.Queue[Piece | Exception]) -> None:
        try:
            async for piece in self._pieces_of(index):
                await queue.put(piece)
        except Exception as error:
            await queue.put(error)

    async def _pieces_of(self, index: int) -> AsyncIterator[Piece]:
        choice, stops = self._choices[index], StopMatcher(self._asked.stops)
        async for token in choice.generation:
            choice.last = token
            choice.new_tokens += 1
            choice.tokens.append(drawn(token, self._asked.likeliest))
            choice.text += token.text
            text = stops.feed(token.text)
            if stops.stopped:
                choice.generation.cancel()
                yield self._finished(index, text, "stop")
                return
            if text:
                yield Piece(index, text, self._taken(choice))
        choice.whole = choice.last is not None
        reason = _REASONS.get(choice.generation.summary.finish_reason, "stop")
        yield self._finished(index, stops.rest(), reason)

    def _taken(self, choice: _Choice) -> tuple[Drawn, ...]:
        tokens, choice.tokens = tuple(choice.tokens), []
        return tokens

    def _finished(self, index: int, text: str, reason: str) -> Piece:
        choice = self._choices[index]
        prompt_tokens = choice.last.counts.tokens_seen - choice.last.index if choice.last else 0
        figures = figures_of(choice.generation, choice.last, (self._asked.seed + index % self._asked.n) % 2**64)
        continued = len(self._turn.held.tokens) if self._turn else 0
        reused = choice.generation.summary.prefix_tokens_reused if choice.generation.finished else 0
        return Piece(
            index,
            text,
            self._taken(choice),
            reason,
            figures | {"continued_tokens": continued},
            prompt_tokens,
            min(continued + reused, prompt_tokens),
            choice.new_tokens,
        )

    async def _leave(self) -> None:
        """Goes on behind a request that is cancelled meanwhile."""
        for reader in self._readers:
            reader.cancel()
        await asyncio.shield(self._background.run(self._close_all()))

    async def _close_all(self) -> None:
        await asyncio.gather(*self._readers, return_exceptions=True)
        await asyncio.gather(*(self._close(choice) for choice in self._choices))

    async def _close(self, choice: _Choice) -> None:
        await asyncio.wait({choice.accepted}, timeout=_ACCEPT_S)
        choice.generation.cancel()
        with contextlib.suppress(HeavywaterError, asyncio.CancelledError):
            await choice.accepted
        if self._turns is not None and choice.whole and choice.last is not None:
            self._turns.keep(self._asked, f"{self._prompts[0]}{choice.text}", choice.generation, choice.last)
            return
        if choice.generation.sequence_id and self._client.has_cache and not self._asked.keep:
            # The server may have closed it, or be gone: then the lease ends it.
            with contextlib.suppress(HeavywaterError):
                await self._client.close(choice.generation.sequence_id)
