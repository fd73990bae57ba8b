"""Which positions of a sequence are where."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from heavywater.errors import HeavywaterError
from heavywater.v1 import sequence_pb2

Positions = npt.NDArray[np.int64]


def expand_ranges(flattened: Sequence[int]) -> Positions:
    """Positions of ranges [first, last), given as first0, last0, first1, last1, ..."""
    if len(flattened) % 2:
        raise ValueError(f"{len(flattened)} bounds of ranges, want an even number")
    parts = [
        np.arange(first, last, dtype=np.int64) for first, last in zip(flattened[::2], flattened[1::2], strict=True)
    ]
    positions: Positions = np.concatenate([np.empty(0, np.int64), *parts])
    return positions


def whole_sets(messages: Iterable[sequence_pb2.SequenceSet]) -> list[sequence_pb2.SequenceSet]:
    """Sets of GetSets' stream: one that exceeds a message comes in several, whose lists are appended."""
    sets: list[sequence_pb2.SequenceSet] = []
    for message in messages:
        if not message.continued:
            sets.append(message)
            continue
        if not sets or (sets[-1].layer, sets[-1].kv_head) != (message.layer, message.kv_head):
            raise HeavywaterError(
                "DATA_LOSS",
                f"GetSets goes on with layer {message.layer}, kv_head {message.kv_head}, "
                "whose first message did not come before it",
            )
        message.continued = False
        sets[-1].MergeFrom(message)
    return sets


@dataclass(frozen=True)
class SequenceSet:
    """One layer's set (kv_head -1: scope `layer`) or one KV head's of one layer (scope `kv_head`).

    sinks, heavy, recent, demoted and dropped are disjoint, ascending, and together
    hold all positions below tokens_seen.
    """

    layer: int
    kv_head: int
    plan: int
    tokens_seen: int
    plan_hash: int
    sinks: Positions
    heavy: Positions
    recent: Positions
    demoted: Positions
    dropped: Positions
    scores: npt.NDArray[np.float64]  # of `resident`, in units of one query head's whole attention

    @property
    def resident(self) -> Positions:
        """Positions in slots: sinks, heavy, recent, in this order."""
        return np.concatenate([self.sinks, self.heavy, self.recent])

    @staticmethod
    def from_proto(message: sequence_pb2.SequenceSet) -> SequenceSet:
        return SequenceSet(
            layer=message.layer,
            kv_head=message.kv_head,
            plan=message.plan,
            tokens_seen=message.tokens_seen,
            plan_hash=message.plan_hash,
            sinks=np.array(message.sinks, np.int64),
            heavy=np.array(message.heavy, np.int64),
            recent=np.array(message.recent, np.int64),
            demoted=expand_ranges(message.demoted_ranges),
            dropped=expand_ranges(message.dropped_ranges),
            scores=np.array(message.scores, np.float64),
        )
