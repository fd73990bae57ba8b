"""Perplexity of one long text, far past the context that the model was trained for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from heavywater.client import Client
from heavywater.eval.rows import BOUNDED, Row
from heavywater.v1 import common_pb2

UNBOUNDED = "snapkv"  # grows in decode: its cache would leave the context, too


@dataclass(frozen=True)
class LongRow:
    """A policy at places within the cache, with so many slots a layer."""

    policy: str
    scope: str
    budget_tokens: int
    sinks: int

    @property
    def name(self) -> str:
        return f"{self.policy}-{self.scope}-{self.budget_tokens}"

    def options(self) -> common_pb2.PolicyOptions:
        options = Row(self.policy, self.scope, 1.0).options(self.budget_tokens)
        options.positions = "cache_relative"
        options.sink_tokens = self.sinks
        return options


@dataclass
class LongResult:
    """Negative log probabilities of the targets, in nats, in order."""

    row: LongRow
    prompt_tokens: int
    nll: list[float] = field(default_factory=list)
    device_bytes: int = 0

    def ppl(self, first: int, end: int) -> float:
        """exp(mean NLL) of the targets at text positions [first, end)."""
        part = self.nll[max(first - self.prompt_tokens, 0) : end - self.prompt_tokens]
        return math.exp(sum(part) / len(part))

    def as_json(self, marks: Sequence[int]) -> dict[str, Any]:
        """`ppl`: of all targets up to each mark; `ppl_since`: of those since the mark before."""
        begins = [self.prompt_tokens, *marks[:-1]]
        return {
            "policy": self.row.policy,
            "scope": self.row.scope,
            "budget_tokens": self.row.budget_tokens,
            "positions": "cache_relative",
            "prompt_tokens": self.prompt_tokens,
            "marks": list(marks),
            "ppl": [self.ppl(self.prompt_tokens, mark) for mark in marks],
            "ppl_since": [self.ppl(begin, mark) for begin, mark in zip(begins, marks, strict=True)],
            "device_bytes": self.device_bytes,
        }


def make_long_rows(policies: Sequence[str], scope: str, budget_tokens: int, sinks: int) -> list[LongRow]:
    """Raises ValueError for what cannot run past the context."""
    known = [policy for policy in BOUNDED if policy != UNBOUNDED]
    for policy in policies:
        if policy not in known:
            raise ValueError(f"{policy!r} is not one of {', '.join(known)}")
    if scope not in ("kv_head", "layer"):
        raise ValueError(f"{scope!r} is not one of kv_head, layer")
    if not 0 <= sinks < budget_tokens // 2:
        raise ValueError(f"{sinks} sinks of {budget_tokens} slots, want fewer than half of them")
    return [LongRow(policy, scope, budget_tokens, sinks) for policy in policies]


def make_marks(every: int, prompt: int, tokens: int) -> list[int]:
    """Text positions at which perplexity is told: every so many, and the end. Raises ValueError."""
    if not prompt < tokens:
        raise ValueError(f"{tokens} tokens with a prompt of {prompt}: nothing is left to score")
    marks = [mark for mark in range(every, tokens, every) if mark > prompt]
    return [*marks, tokens]


def measure_long(
    client: Client, row: LongRow, ids: list[int], prompt_tokens: int, on_token: Callable[[], None] = lambda: None
) -> LongResult:
    """Feeds the text's own tokens behind a prompt of its first ones; scores each of them."""
    result = LongResult(row, prompt_tokens)
    with client.generate(ids[:prompt_tokens], forced_tokens=ids[prompt_tokens:], policy=row.options()) as generation:
        for token in generation:
            result.nll.append(-token.logprob)
            on_token()
    if len(result.nll) != len(ids) - prompt_tokens:
        raise RuntimeError(f"{row.name}: {len(result.nll)} tokens scored, want {len(ids) - prompt_tokens}")
    result.device_bytes = generation.summary.device_bytes_peak
    if client.has_cache:
        client.close(generation.sequence_id)  # frees its pages
    return result
