"""What has happened between two looks, per second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heavywater.top.sample import RankSample, Sample


@dataclass(frozen=True)
class RankRates:
    """Of one rank. step_ms is the mean decode step's, 0 where there was none."""

    per_s: dict[str, float]  # of RankSample.counters
    step_ms: float = 0.0
    steps_per_s: float = 0.0


@dataclass(frozen=True)
class Rates:
    """By the order of the later sample's ranks, and by sequence id."""

    ranks: Sequence[RankRates]
    tokens_per_s: dict[int, float]  # of a sequence, once its prompt is read

    @property
    def total_tokens_per_s(self) -> float:
        """New tokens of the group: rank 0 counts them; the others, if they do, count the same ones."""
        return max((rank.per_s.get("tokens", 0.0) for rank in self.ranks), default=0.0)


def rates_between(before: Sample | None, after: Sample) -> Rates:
    """Zeros where there is nothing before."""
    if before is None or after.at_s <= before.at_s:
        return Rates([RankRates({}) for _ in after.ranks], {})
    seconds = after.at_s - before.at_s
    earlier = {rank.address: rank for rank in before.ranks}
    seen = {one.sequence_id: one.counts.tokens_seen for one in before.sequences}
    return Rates(
        [_of_rank(earlier.get(rank.address), rank, seconds) for rank in after.ranks],
        {
            one.sequence_id: max(0, one.counts.tokens_seen - seen[one.sequence_id]) / seconds
            for one in after.sequences
            if seen.get(one.sequence_id)  # a prompt is read in one go: no rate
        },
    )


def _of_rank(before: RankSample | None, after: RankSample, seconds: float) -> RankRates:
    if before is None or before.error or after.error:
        return RankRates({})
    steps = after.decode_steps - before.decode_steps
    if steps < 0:  # a new process: it counts from 0
        return RankRates({})
    per_s = {name: max(0.0, count - before.counters.get(name, 0.0)) / seconds for name, count in after.counters.items()}
    busy_s = after.decode_seconds - before.decode_seconds
    return RankRates(per_s, 1000 * busy_s / steps if steps else 0.0, steps / seconds)
