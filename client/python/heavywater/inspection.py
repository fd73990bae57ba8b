"""What a sequence's sets say about each position, over all its layers and heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from heavywater.sets import SequenceSet

KINDS = ("sinks", "recent", "heavy", "demoted", "dropped")


@dataclass(frozen=True)
class Inspection:
    """Shares are of the sets (layers, or layers and KV heads), arrays are [tokens_seen]."""

    tokens_seen: int
    plan: int
    num_sets: int
    shares: dict[str, npt.NDArray[np.float64]]  # by kind
    scores: npt.NDArray[np.float64]  # mean over the sets in which the position is resident, else 0

    def counts(self) -> dict[str, float]:
        """Mean positions of each kind in a set."""
        return {kind: float(share.sum()) for kind, share in self.shares.items()}

    def kind_of(self, position: int) -> str:
        """What the position is in most sets; the more protected kind on a tie."""
        return max(KINDS, key=lambda kind: self.shares[kind][position])

    def heaviest(self, count: int) -> list[int]:
        """Positions that are heavy in the most sets, then by score."""
        heavy = self.shares["heavy"]
        order = np.lexsort((-self.scores, -heavy))
        return [int(position) for position in order[:count] if heavy[position] > 0]


def inspect_sets(sets: Sequence[SequenceSet]) -> Inspection:
    """Raises ValueError when there is no set."""
    if not sets:
        raise ValueError("the cache service has no sets of this sequence yet: no plan has been made")
    seen = max(one.tokens_seen for one in sets)
    shares = {kind: np.zeros(seen) for kind in KINDS}
    score_sums, resident = np.zeros(seen), np.zeros(seen)
    for one in sets:
        for kind in KINDS:
            shares[kind][getattr(one, kind)] += 1 / len(sets)
        score_sums[one.resident] += one.scores
        resident[one.resident] += 1
    scores = score_sums / np.maximum(resident, 1)
    return Inspection(seen, max(one.plan for one in sets), len(sets), shares, scores)
