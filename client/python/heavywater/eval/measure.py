"""Runs one window of text under one policy and measures it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from heavywater.client import Client
from heavywater.eval.figures import Logits, Totals
from heavywater.eval.rows import Row
from heavywater.sets import SequenceSet
from heavywater.v1 import generation_pb2


@dataclass(frozen=True)
class Window:
    """A stretch of the text: the prompt, and the tokens that really follow."""

    offset: int  # in tokens
    prompt: list[int]
    targets: list[int]


@dataclass
class Measurement:
    """What one window showed under one row's policy."""

    row: Row
    window: Window
    totals: Totals = field(default_factory=Totals)
    device_bytes: int = 0  # measured, peak after the prompt
    full_cache_bytes: int = 0
    sets: list[SequenceSet] = field(default_factory=list)  # after the last plan, when asked for


class LogitsSink(Protocol):
    """Keeps each step's logits."""

    def __call__(self, index: int, logits: Logits) -> None: ...


def make_windows(ids: list[int], offsets: list[int], prompt: int, continuation: int) -> list[Window]:
    """Raises ValueError when the text is too short."""
    windows = []
    for offset in offsets:
        end = offset + prompt + continuation
        if offset < 0 or end > len(ids):
            raise ValueError(f"offset {offset}: the window ends at token {end}, the text has {len(ids)}")
        windows.append(Window(offset, ids[offset : offset + prompt], ids[offset + prompt : end]))
    return windows


def measure(
    client: Client,
    row: Row,
    window: Window,
    full: Logits,
    *,
    keep_logits: LogitsSink | None = None,
    read_sets: bool = False,
    on_token: Callable[[], None] = lambda: None,
) -> Measurement:
    """Feeds the window's own tokens and compares each step's logits with the full cache's.

    The first target is predicted by the prompt's last token, so that the last target is
    never fed. Memory: one step's logits. When the row is the full cache, `full` is filled.
    """
    result = Measurement(row, window)
    is_full = row.budget is None
    with client.generate(
        window.prompt,
        forced_tokens=window.targets,
        return_logits=True,
        policy=row.options(len(window.prompt)),
    ) as generation:
        for token in generation:
            if token.logits is None or token.token != window.targets[token.index]:
                raise RuntimeError(f"step {token.index} of {row.name}: no logits, or not of the forced token")
            if is_full:
                full[token.index] = token.logits
            if keep_logits is not None:
                keep_logits(token.index, token.logits)
            result.totals.add(token.logits, full[token.index], token.token)
            on_token()
    if result.totals.positions != len(window.targets):
        raise RuntimeError(f"{row.name}: {result.totals.positions} steps, want {len(window.targets)}")
    require_all_copies(row.name, generation.summary)
    result.device_bytes = generation.summary.device_bytes_peak
    result.full_cache_bytes = generation.summary.full_cache_bytes
    if client.has_cache:
        if read_sets:
            result.sets = sets_of_plan(client, generation.sequence_id, generation.summary.plan)
        client.close(generation.sequence_id)  # frees its pages
    return result


def require_all_copies(name: str, summary: generation_pb2.GenerateSummary) -> None:
    """Raises when recall lacked copies of demoted tokens: the figures would not be the policy's."""
    if summary.HasField("recall") and summary.counts.tokens_dropped > 0:
        raise RuntimeError(
            f"{name}: {summary.counts.tokens_dropped:.0f} tokens were dropped, so recall could not read them: "
            "host memory was full, or the cache service out of reach"
        )


def sets_of_plan(client: Client, sequence_id: int, plan: int, timeout_s: float = 10.0) -> list[SequenceSet]:
    """The sets after a plan. Ranks report behind their steps: waits until all have."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        sets = list(client.get_sets(sequence_id))
        if sets and all(one.plan >= plan for one in sets):
            return sets
        if time.monotonic() > deadline_s:
            reported = min((one.plan for one in sets), default=0)
            raise RuntimeError(f"sequence {sequence_id}: plan {reported} is reported, want {plan}")
        time.sleep(0.05)
