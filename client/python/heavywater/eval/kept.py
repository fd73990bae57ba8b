"""Which positions have slots, and what attention they have received, read from the cache service."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from heavywater.client import Client
from heavywater.eval.measure import sets_of_plan
from heavywater.eval.rows import Row
from heavywater.sets import SequenceSet
from heavywater.v1 import common_pb2


def read_sets(
    client: Client, prompt: Sequence[int], forced: Sequence[int], policy: common_pb2.PolicyOptions
) -> list[SequenceSet]:
    """The sets after a prompt and the tokens forced after it, all but the last of which are fed."""
    with client.generate(
        list(prompt), forced_tokens=list(forced), max_new_tokens=0 if forced else 1, ignore_eos=True, policy=policy
    ) as generation:
        for _ in generation:
            pass
    sets = sets_of_plan(client, generation.sequence_id, generation.summary.plan)
    client.close(generation.sequence_id)
    return sets


def received(client: Client, tokens: Sequence[int], policy: str, window: int = 0) -> npt.NDArray[np.float64]:
    """What each position of a prompt received, [layers, kv_heads, positions], each KV head's group summed.

    "h2o": attention of all queries; "snapkv_h2o": of the last `window`; "scissorhands": for
    how many of the last `window` it was pivotal.
    """
    options = common_pb2.PolicyOptions(
        policy=policy, scope="kv_head", heavy_tokens=len(tokens), recent_tokens=1, plan_interval_steps=1
    )
    if policy == "scissorhands":
        options.history_window = window
        options.plan_interval_steps = max(1, -(-window // 512))
    elif window:
        options.window = window
    sets = read_sets(client, tokens, (), options)
    layers, heads = max(one.layer for one in sets) + 1, max(one.kv_head for one in sets) + 1
    sums = np.full((layers, heads, len(tokens)), np.nan)
    for one in sets:
        sums[one.layer, one.kv_head, one.resident] = one.scores
    if np.isnan(sums).any():
        raise RuntimeError(f"{int(np.isnan(sums).sum())} positions of a set that holds all are missing")
    return sums


def resident_shares(client: Client, prompt: Sequence[int], forced: Sequence[int], row: Row) -> npt.NDArray[np.float64]:
    """[positions]: share of the sets in which each position has a slot after a prompt and forced tokens."""
    sets = read_sets(client, prompt, forced, row.options(len(prompt)))
    shares = np.zeros(sets[0].tokens_seen)
    for one in sets:
        shares[one.resident] += 1 / len(sets)
    return shares
