"""The request of a Generate call, and how a stream that broke off is continued."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from heavywater.errors import HeavywaterError
from heavywater.v1 import common_pb2, generation_pb2

# A text, token ids, or the messages of a conversation ({"role", "content"} each).
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]

_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 1.0


def generation_request(
    prompt: Prompt,
    suffix: str | Sequence[int],
    *,
    max_new_tokens: int,
    policy: common_pb2.PolicyOptions | None,
    sampling: generation_pb2.Sampling,
    ignore_eos: bool,
    forced_tokens: Sequence[int],
    return_logits: bool,
    return_reads: bool,
    request_id: str,
    tenant: str,
    continue_sequence_id: int = 0,
    prefix_reuse: bool | None = None,
) -> generation_pb2.GenerateRequest:
    """As Client.generate describes its arguments."""
    request = generation_pb2.GenerateRequest(
        max_new_tokens=max_new_tokens,
        ignore_eos=ignore_eos,
        sampling=sampling,
        policy=policy,
        forced_tokens=forced_tokens,
        return_logits=return_logits,
        return_reads=return_reads,
        request_id=request_id,
        tenant=tenant,
        continue_sequence_id=continue_sequence_id,
    )
    if prefix_reuse is not None:
        request.prefix_reuse = prefix_reuse
    if isinstance(prompt, str):
        request.text = prompt
    elif prompt and isinstance(prompt[0], Mapping):
        request.messages.extend(_message(message) for message in cast(Sequence[Mapping[str, str]], prompt))
    else:
        request.tokens.extend(cast(Sequence[int], prompt))
    if isinstance(suffix, str):
        request.suffix_text = suffix
    else:
        request.suffix_tokens.extend(suffix)
    return request


def _message(message: Mapping[str, str]) -> generation_pb2.ChatMessage:
    if message.keys() != {"role", "content"}:
        raise ValueError(f"a message has {sorted(message)}, want role and content")
    return generation_pb2.ChatMessage(role=message["role"], content=message["content"])


class Resumption:
    """What it takes to go on with a stream; calls nothing itself."""

    def __init__(
        self,
        request: generation_pb2.GenerateRequest,
        timeout_s: float,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`timeout_s`: without a new token; 0: a stream that breaks off is not continued."""
        self._request = request
        self._timeout_s = timeout_s
        self._now_s = now_s
        self._received: list[int] = []
        self._broken_since_s: float | None = None
        self._backoff_s = _FIRST_BACKOFF_S

    def note_token(self, token: int) -> None:
        """A token has come: whatever was broken is not."""
        self._broken_since_s = None
        self._backoff_s = _FIRST_BACKOFF_S
        if self._timeout_s > 0:
            self._received.append(token)

    def next_backoff_s(self, error: HeavywaterError, sequence_id: int) -> float:
        """How long to wait before the next attempt. Raises `error` where there is nothing to wait for,
        or was for too long."""
        if self._timeout_s <= 0 or error.code != "UNAVAILABLE" or not sequence_id:
            raise error
        now_s = self._now_s()
        if self._broken_since_s is None:
            self._broken_since_s = now_s
        if now_s - self._broken_since_s > self._timeout_s:
            raise error
        backoff_s = self._backoff_s
        self._backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
        return backoff_s

    def request(self, sequence_id: int) -> generation_pb2.GenerateRequest:
        """The same request, from the first token that has not come."""
        request = generation_pb2.GenerateRequest()
        request.CopyFrom(self._request)
        request.resume.sequence_id = sequence_id
        request.resume.from_token = len(self._received)
        request.resume.received_tokens.extend(self._received)
        return request
