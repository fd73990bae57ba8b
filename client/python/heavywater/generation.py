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


@dataclass(frozen=True)
class ResumeOptions:
    """How a stream that breaks off is continued."""

    request: generation_pb2.GenerateRequest
    generate: Callable[[generation_pb2.GenerateRequest], Any]  # opens a call
    timeout_s: float  # without a new token
    sleep: Callable[[float], None] = time.sleep


_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 1.0


class Generation:
    """Iterates over the tokens; cancels the call when left early.

    with client.generate("Once", max_new_tokens=32) as generation:
        for token in generation:
            print(token.text, end="")
    print(generation.summary.finish_reason)
    """

    def __init__(self, call: Any, resume: ResumeOptions | None = None) -> None:
        self._call = call
        self._resume = resume
        self._received: list[int] = []  # tokens, for who resumes
        self._broken_since_s: float | None = None
        self._backoff_s = _FIRST_BACKOFF_S
        self._cancelled = False
        self._sequence_id = 0
        self._summary: generation_pb2.GenerateSummary | None = None

    @property
    def sequence_id(self) -> int:
        """The sequence's id in the cache service; 0 before the request was accepted. Another one
        where the tokens had to be computed again."""
        return self._sequence_id

    @property
    def summary(self) -> generation_pb2.GenerateSummary:
        """Effective policy, budgets and figures. Raises before the stream has ended."""
        if self._summary is None:
            raise RuntimeError("the summary comes with the last message: read the tokens first")
        return self._summary

    def __iter__(self) -> Iterator[Token]:
        while True:
            try:
                with translated():
                    for response in self._call:
                        if response.sequence_id:
                            self._sequence_id = response.sequence_id
                        if response.HasField("summary"):
                            self._summary = response.summary
                        if response.HasField("index"):
                            self._note_token(response.token)
                            yield _token(response)
                return
            except HeavywaterError as error:
                self._wait_before_resuming(error)
            self._open_again()

    def _note_token(self, token: int) -> None:
        self._broken_since_s = None
        self._backoff_s = _FIRST_BACKOFF_S
        if self._resume is not None:
            self._received.append(token)

    def _wait_before_resuming(self, error: HeavywaterError) -> None:
        """Raises the error where there is nothing to wait for, or was for too long."""
        if self._resume is None or error.code != "UNAVAILABLE" or not self._sequence_id or self._cancelled:
            raise error
        now_s = time.monotonic()
        if self._broken_since_s is None:
            self._broken_since_s = now_s
        if now_s - self._broken_since_s > self._resume.timeout_s:
            raise error
        self._resume.sleep(self._backoff_s)
        self._backoff_s = min(2 * self._backoff_s, _MAX_BACKOFF_S)

    def _open_again(self) -> None:
        assert self._resume is not None
        request = generation_pb2.GenerateRequest()
        request.CopyFrom(self._resume.request)
        request.resume.sequence_id = self._sequence_id
        request.resume.from_token = len(self._received)
        request.resume.received_tokens.extend(self._received)
        with translated():
            self._call = self._resume.generate(request)

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

    def cancel(self) -> None:
        """Ends the call; what the sequence held on the device is freed."""
        self._cancelled = True
        self._call.cancel()

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


def mean_reads(counts: common_pb2.RecallCounts) -> float:
    """Demoted positions that a query read in place: mean over queries, KV heads and layers."""
    return counts.reads / counts.queries if counts.queries else 0.0


def _token(response: generation_pb2.GenerateResponse) -> Token:
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
