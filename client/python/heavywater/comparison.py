"""One request under a policy and under the full cache: where the answers part, and what the policy did not see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from heavywater.client import Client
from heavywater.errors import HeavywaterError
from heavywater.eval.figures import log_softmax
from heavywater.generation import Token
from heavywater.v1 import common_pb2

THE_MODEL_ITSELF = "the model itself"  # the full cache gives the same answer
NOT_RECALLED = "not recalled"
EVICTED = "evicted"

NOTICED_SHARE = 0.01  # of a query's attention, by the sketch's estimate
_NOTHING_STANDS_OUT = (
    f"no unread token would have had {NOTICED_SHARE:.0%} of a query's attention in this step: "
    "many small shares, or earlier steps, made the difference"
)
_PROBED_TOKENS = 512  # that a query may read in the probe
_MAX_READS = 256  # positions in one response


@dataclass(frozen=True)
class Request:
    """What is asked, greedily."""

    prompt: str
    suffix: str
    max_new_tokens: int
    policy: common_pb2.PolicyOptions


@dataclass(frozen=True)
class Comparison:
    """`at`: the first token that differs; None: all are equal, and nothing else is set."""

    policy_answer: list[Token]
    full_answer: list[Token]
    at: int | None
    verdict: str
    # Demoted positions with the number of queries (of the step's tokens, in a layer and KV
    # head) that would have given them NOTICED_SHARE of their attention, beyond those that
    # read them; the most first.
    missing: list[tuple[int, int]] = field(default_factory=list)
    note: str = ""  # why there are none


def compare(client: Client, request: Request) -> Comparison:
    """Two runs, and up to two replays of the policy's when they differ."""
    full = common_pb2.PolicyOptions(policy="full")
    policy_answer, recalls = _answer(client, request, request.policy)
    full_answer, _ = _answer(client, request, full)
    at = first_difference(policy_answer, full_answer)
    if at is None:
        return Comparison(policy_answer, full_answer, None, THE_MODEL_ITSELF)
    verdict = NOT_RECALLED if recalls else EVICTED
    forced = [token.token for token in policy_answer[: at + 1]]
    try:
        noticed = _reads(client, request, probe_of(request.policy, recalls), forced)
    except HeavywaterError as error:
        return Comparison(policy_answer, full_answer, at, verdict, note=f"the step cannot be replayed: {error}")
    read = _reads(client, request, request.policy, forced) if recalls else ()
    missing = missing_reads(noticed, read)
    note = "" if missing else _NOTHING_STANDS_OUT
    return Comparison(policy_answer, full_answer, at, verdict, missing, note)


def first_difference(one: Sequence[Token], other: Sequence[Token]) -> int | None:
    """The index of the first token that differs."""
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a.token != b.token), None)


def probe_of(policy: common_pb2.PolicyOptions, recalls: bool) -> common_pb2.PolicyOptions:
    """The same policy whose queries read every demoted token that should have NOTICED_SHARE of their attention."""
    probe = common_pb2.PolicyOptions()
    probe.CopyFrom(policy)
    probe.recall = True
    probe.recall_all = False
    probe.recall_tokens = _PROBED_TOKENS
    probe.recall_min_share = NOTICED_SHARE
    if not recalls:
        probe.promote_candidates = 0  # what is resident stays what the policy keeps
    return probe


def missing_reads(noticed: Sequence[tuple[int, int]], read: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(position, queries that noticed it beyond those that read it), the most first.

    A response names the most read positions only: where it is full, any other may have
    been read as often as the last of them.
    """
    unnamed = read[-1][1] if len(read) == _MAX_READS else 0
    counts = dict(read)
    missing = Counter({position: count - counts.get(position, unnamed) for position, count in noticed})
    return sorted((+missing).items(), key=lambda one: (-one[1], one[0]))


def most_likely(token: Token, count: int) -> list[tuple[int, float]]:
    """(token id, probability) of the likeliest tokens of its step. Raises ValueError without logits."""
    if token.logits is None:
        raise ValueError(f"token {token.index} came without logits")
    probabilities = np.exp(log_softmax(token.logits))
    order = np.argsort(-probabilities, kind="stable")[:count]
    return [(int(one), float(probabilities[one])) for one in order]


def _answer(client: Client, request: Request, policy: common_pb2.PolicyOptions) -> tuple[list[Token], bool]:
    """The tokens, and whether recall was on."""
    generation = client.generate(
        request.prompt,
        suffix=request.suffix,
        max_new_tokens=request.max_new_tokens,
        policy=policy,
        return_logits=True,
    )
    tokens = list(generation)
    return tokens, generation.summary.HasField("recall")


def _reads(
    client: Client, request: Request, policy: common_pb2.PolicyOptions, forced: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Of the step that leads to the last of the forced tokens."""
    generation = client.generate(
        request.prompt, suffix=request.suffix, forced_tokens=forced, policy=policy, return_reads=True
    )
    return list(generation)[-1].reads
