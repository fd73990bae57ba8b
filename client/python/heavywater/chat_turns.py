"""What the sequence of a chat's last answer holds, so that the next question can go on with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from heavywater.client import Client
from heavywater.errors import HeavywaterError
from heavywater.generation import Generation, Token
from heavywater.v1 import sequence_pb2

_KEEP_S = 600.0  # while the next question is being thought of
_REPORT_S = 1.0  # for the ranks' last reports to arrive
_POLL_S = 0.05
# What is appended goes through the layers a few tokens a step: where more than this part of the text is new,
# the whole is computed sooner as a prompt.
_MAX_NEW_PART = 0.25
# A sequence's budget follows from its prompt: a text that has outgrown it gets a new one.
_MAX_GROWTH = 2


@dataclass(frozen=True)
class Held:
    """By the sequence: the tokens, which read as the text."""

    sequence_id: int
    text: str
    tokens: list[int]
    prompt_tokens: int

    def rest_of(self, prompt: str, encode: Callable[[str], list[int]]) -> str:
        """What follows the text in `prompt`; empty where it does not begin so, or is better computed anew."""
        rest = prompt.removeprefix(self.text)
        if rest == prompt or not rest:
            return ""
        new_tokens = len(encode(rest))
        if new_tokens > _MAX_NEW_PART * len(self.tokens):
            return ""
        return rest if len(self.tokens) + new_tokens <= _MAX_GROWTH * self.prompt_tokens else ""


def hold(client: Client, generation: Generation, text: str, last: Token) -> Held | None:
    """After a whole answer, which ended with the token `last`: keeps its sequence for the next question. `text`: prompt
    and answer. None where there is no cache service, or not all of the sequence is known to it."""
    if not client.has_cache:
        return None
    summary = generation.summary
    try:
        sequence = _reported(client, generation.sequence_id, round(summary.counts.tokens_seen))
        if sequence is None:
            return None
        client.suspend(generation.sequence_id, _KEEP_S)
    except HeavywaterError:  # a policy without states to go on from, say
        return None
    # The last token was not taken in; one that ends the answer is part of what the template puts behind it.
    tokens = [*sequence.tokens] + ([] if summary.finish_reason == "eos" else [last.token])
    return Held(generation.sequence_id, text, tokens, sequence.prompt_tokens)


def _reported(client: Client, sequence_id: int, num_tokens: int) -> sequence_pb2.Sequence | None:
    deadline_s = time.monotonic() + _REPORT_S
    while True:
        sequence = client.get(sequence_id)
        if len(sequence.tokens) == num_tokens and sequence.finished:
            return sequence
        if time.monotonic() > deadline_s:
            return None
        time.sleep(_POLL_S)
