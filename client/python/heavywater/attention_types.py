"""What an engine tells AttentionService, and what it is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc
import numpy as np
import numpy.typing as npt

from heavywater.errors import HeavywaterError
from heavywater.v1 import attention_pb2, common_pb2

# Phases of an item.
PROMPT = attention_pb2.PROMPT
PROMPT_LAST = attention_pb2.PROMPT_LAST
DECODE = attention_pb2.DECODE

_CODES = {code.value[0]: code.name for code in grpc.StatusCode}


def error_of(code: int, message: str) -> HeavywaterError:
    """The error that a message in a stream carries."""
    return HeavywaterError(_CODES.get(code, "UNKNOWN"), message)


@dataclass(frozen=True)
class AttentionShape:
    """The model whose Q, K and V the engine brings; `dtype`: in which K and V are kept, "fp32" or "bf16"."""

    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "bf16"


@dataclass(frozen=True)
class AttentionItem:
    """New tokens of one sequence in a step."""

    sequence_id: int
    phase: attention_pb2.AttentionPhase
    first_position: int  # must be the tokens taken in so far
    num_tokens: int = 1
    note_picks: bool = False

    def to_proto(self) -> attention_pb2.BeginStep.Item:
        return attention_pb2.BeginStep.Item(
            sequence_id=self.sequence_id,
            phase=self.phase,
            first_position=self.first_position,
            num_tokens=self.num_tokens,
            note_picks=self.note_picks,
        )


@dataclass(frozen=True)
class ItemStatus:
    """How an item of a step fared: code 0, or gRPC's and why."""

    code: int
    message: str

    def ok(self) -> bool:
        return self.code == 0

    def raise_if_failed(self) -> None:
        if not self.ok():
            raise error_of(self.code, self.message)


@dataclass
class KeptSet:
    """One layer's set: `kv_head` -1 where all heads share it. Positions ascending, scores in units of 2^-32."""

    layer: int
    kv_head: int
    positions: npt.NDArray[np.int32]
    scores: npt.NDArray[np.int64]


@dataclass
class KeptPicks:
    """The demoted positions that the query at `query` read in place."""

    layer: int
    kv_head: int
    query: int
    positions: npt.NDArray[np.int32]


@dataclass
class Kept:
    """What a sequence holds after its last step."""

    counts: attention_pb2.KeptCounts
    sets: list[KeptSet] = field(default_factory=list)
    picks: list[KeptPicks] = field(default_factory=list)

    @classmethod
    def from_messages(cls, messages: Sequence[attention_pb2.KeptResponse]) -> Kept:
        kept = cls(messages[0].counts if messages else attention_pb2.KeptCounts())
        for message in messages:
            if message.HasField("set"):
                kept._add_set(message.set)
            elif message.HasField("picks"):
                picks = message.picks
                positions = np.array(picks.positions, np.int32)
                kept.picks.append(KeptPicks(picks.layer, picks.kv_head, picks.query, positions))
        return kept

    def _add_set(self, part: attention_pb2.KeptSet) -> None:
        """One that exceeds a message comes in several."""
        positions, scores = np.array(part.positions, np.int32), np.array(part.scores, np.int64)
        if part.continued:
            last = self.sets[-1]
            last.positions = np.concatenate([last.positions, positions])
            last.scores = np.concatenate([last.scores, scores])
        else:
            self.sets.append(KeptSet(part.layer, part.kv_head, positions, scores))

    @classmethod
    def joined(cls, ranks: Sequence[Kept]) -> Kept:
        """Of all ranks: shared sets once (ranks hold the same), the others and picks by layer and head."""
        sets = {(one.layer, one.kv_head): one for rank in ranks for one in rank.sets}
        picks = sorted((one for rank in ranks for one in rank.picks), key=lambda p: (p.layer, p.kv_head, p.query))
        counts = attention_pb2.KeptCounts()
        counts.CopyFrom(ranks[0].counts)
        counts.device_bytes = sum(rank.counts.device_bytes for rank in ranks)
        if counts.HasField("recall"):
            counts.recall.CopyFrom(_summed([rank.counts.recall for rank in ranks]))
        return cls(counts, [sets[key] for key in sorted(sets)], picks)


def _summed(ranks: Sequence[common_pb2.RecallCounts]) -> common_pb2.RecallCounts:
    """As the API says: promoted and mass_missing are means, reads_max the largest."""
    return common_pb2.RecallCounts(
        queries=sum(rank.queries for rank in ranks),
        reads=sum(rank.reads for rank in ranks),
        reads_max=max(rank.reads_max for rank in ranks),
        promoted=sum(rank.promoted for rank in ranks) / len(ranks),
        mass_missing=sum(rank.mass_missing for rank in ranks) / len(ranks),
        sketch_bytes=sum(rank.sketch_bytes for rank in ranks),
    )
