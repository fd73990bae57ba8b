"""The stream of a Generate call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from heavywater.errors import HeavywaterError, translated
from heavywater.generation_request import Resumption
from heavywater.v1 import common_pb2, generation_pb2


@dataclass(frozen=True)
class Token:
    """One new token, with the figures of its step."""

    index: int  # counts from 0
    token: int
    text: str  # that this token completes; may be empty
    logprob: float  # natural log, temperature 1
    logits: npt.NDArray[np.float32] | None  # [vocab_size], when asked for
    counts: common_pb2.SequenceCounts
    device_bytes: int  # KV of this sequence, summed over ranks
    host_bytes: int
    # With return_reads: (position, count) of the demoted positions read in place since
    # the previous token, the most read first; a read is a token's, in one layer and KV
    # head. After a suffix the first token's cover the whole suffix.
    reads: tuple[tuple[int, int], ...] = ()


class GenerationState:
    """What a stream has told so far, and whether it was cancelled: of both clients' Generation."""

    _call: Any  # the running call

    def __init__(self, request: generation_pb2.GenerateRequest, resume_timeout_s: float) -> None:
        self._resumption = Resumption(request, resume_timeout_s)
        self._cancelled = False
        self._sequence_id = 0
        self._summary: generation_pb2.GenerateSummary | None = None

    @property
    def sequence_id(self) -> int:
        """The sequence's id in the cache service; 0 before the request was accepted. Another one
        where the tokens had to be computed again."""
        return self._sequence_id

    @property
    def finished(self) -> bool:
        """Whether the stream has ended, with its summary."""
        return self._summary is not None

    @property
    def summary(self) -> generation_pb2.GenerateSummary:
        """Effective policy, budgets and figures. Raises before the stream has ended."""
        if self._summary is None:
            raise RuntimeError("the summary comes with the last message: read the tokens first")
        return self._summary

    def cancel(self) -> None:
        """Ends the call; what the sequence held on the device is freed."""
        self._cancelled = True
        self._call.cancel()

    def _take(self, response: generation_pb2.GenerateResponse) -> Token | None:
        """Notes what a message says; its token, if it has one."""
        if response.sequence_id:
            self._sequence_id = response.sequence_id
        if response.HasField("summary"):
            self._summary = response.summary
        if not response.HasField("index"):
            return None
        self._resumption.note_token(response.token)
        return token_of(response)

    def _next_attempt(self, error: HeavywaterError) -> float:
        """Seconds until the stream is asked for again. Raises `error` where it is not."""
        if self._cancelled:
            raise error
        return self._resumption.next_backoff_s(error, self._sequence_id)

    def _request(self) -> generation_pb2.GenerateRequest:
        """From the first token that has not come."""
        return self._resumption.request(self._sequence_id)


class Generation(GenerationState):
    """Iterates over the tokens; cancels the call when left early.

    with client.generate("Once", max_new_tokens=32) as generation:
        for token in generation:
            print(token.text, end="")
    print(generation.summary.finish_reason)
    """

    def __init__(
        self,
        generate: Callable[[generation_pb2.GenerateRequest], Any],
        request: generation_pb2.GenerateRequest,
        resume_timeout_s: float,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`generate` opens a call."""
        super().__init__(request, resume_timeout_s)
        self._generate = generate
        self._sleep = sleep
        with translated():
            self._call = generate(request)

    def __iter__(self) -> Iterator[Token]:
        while True:
            try:
                with translated():
                    for response in self._call:
                        if (token := self._take(response)) is not None:
                            yield token
                return
            except HeavywaterError as error:
                self._sleep(self._next_attempt(error))
            with translated():
                self._call = self._generate(self._request())

    def wait_accepted(self) -> int:
        """Waits until the request is accepted, which is before its prompt is computed; returns the
        sequence's id, 0 when the stream ended without naming one. To be called before the tokens are read."""
        with translated():
            response = next(self._call, None)  # names the sequence, has no token
        if response is not None:
            self._sequence_id = response.sequence_id
        return self._sequence_id

    def text(self) -> str:
        """Reads to the end; returns the text."""
        return "".join(token.text for token in self)

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


def mean_reads(counts: common_pb2.RecallCounts) -> float:
    """Demoted positions that a query read in place: mean over queries, KV heads and layers."""
    return counts.reads / counts.queries if counts.queries else 0.0


def token_of(response: generation_pb2.GenerateResponse) -> Token:
    """The token of a message that has one."""
    logits = np.frombuffer(response.logits, dtype="<f4") if response.logits else None
    return Token(
        index=response.index,
        token=response.token,
        text=response.text,
        logprob=response.logprob,
        logits=logits,
        counts=response.counts,
        device_bytes=response.device_bytes,
        host_bytes=response.host_bytes,
        reads=tuple((one.position, one.count) for one in response.reads),
    )
