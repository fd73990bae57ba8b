"""Figures of a load run, from what came of each sequence. Pure."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

COMPLETED, CANCELLED, REFUSED, FAILED = "completed", "cancelled", "refused", "failed"
# A server may say these under load: it is full, or going. Whatever else it says is unexpected.
REFUSALS = frozenset({"RESOURCE_EXHAUSTED", "UNAVAILABLE"})
QUANTILES = (50, 95, 99)


@dataclass
class Outcome:
    """What came of one sequence. Times are of one monotonic clock, in seconds."""

    asked_s: float  # when the client asked or, in an open loop, was to ask
    kind: str = COMPLETED
    code: str = ""  # of REFUSED and FAILED
    message: str = ""
    token_times_s: list[float] = field(default_factory=list)  # when each new token came
    ended_s: float = 0.0
    late_s: float = 0.0  # how much later than planned it was asked


def kind_of(code: str) -> str:
    """REFUSED or FAILED, by the status of a call."""
    return REFUSED if code in REFUSALS else FAILED


def percentile(values: Sequence[float], percent: float) -> float:
    """The least of the (sorted) values that `percent` % of them do not exceed. Raises ValueError without any."""
    if not values:
        raise ValueError("no values, want one or more")
    rank = math.ceil(percent / 100 * len(values))
    return values[max(rank, 1) - 1]


def quantiles_ms(seconds: Iterable[float]) -> dict[str, float] | None:
    """p50, p95 and p99 in milliseconds; None without values."""
    values = sorted(seconds)
    if not values:
        return None
    return {f"p{percent}": 1000 * percentile(values, percent) for percent in QUANTILES}


@dataclass(frozen=True)
class LoadFigures:
    """What `heavywater load --json` prints, but for the leak check."""

    sequences: int
    completed: int
    cancelled: int
    refused: dict[str, int]  # by status code
    errors: dict[str, int]  # unexpected ones, by status code
    tokens: int  # new ones that arrived
    duration_s: float  # from the first request to the last end
    time_to_first_token_ms: dict[str, float] | None
    time_per_token_ms: dict[str, float] | None  # from one token of a sequence to its next
    late_ms: float  # open loop: the longest that a request waited for a free client

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.duration_s if self.duration_s > 0 else 0.0

    def row(self) -> dict[str, object]:
        return {
            "sequences": self.sequences,
            "completed": self.completed,
            "cancelled": self.cancelled,
            "refused": self.refused,
            "errors": self.errors,
            "tokens": self.tokens,
            "tokens_per_s": self.tokens_per_s,
            "duration_s": self.duration_s,
            "time_to_first_token_ms": self.time_to_first_token_ms,
            "time_per_token_ms": self.time_per_token_ms,
            "late_ms": self.late_ms,
        }


def figures_of(outcomes: Sequence[Outcome]) -> LoadFigures:
    """Sums up a run. Latencies count all tokens that came, also of sequences cancelled later."""
    kinds = Counter(outcome.kind for outcome in outcomes)
    times = [outcome.token_times_s for outcome in outcomes]
    started_s = min((outcome.asked_s for outcome in outcomes), default=0.0)
    ended_s = max((outcome.ended_s for outcome in outcomes), default=0.0)
    return LoadFigures(
        sequences=len(outcomes),
        completed=kinds[COMPLETED],
        cancelled=kinds[CANCELLED],
        refused=_by_code(outcomes, REFUSED),
        errors=_by_code(outcomes, FAILED),
        tokens=sum(len(each) for each in times),
        duration_s=ended_s - started_s,
        time_to_first_token_ms=quantiles_ms(
            outcome.token_times_s[0] - outcome.asked_s for outcome in outcomes if outcome.token_times_s
        ),
        time_per_token_ms=quantiles_ms(after - before for each in times for before, after in itertools.pairwise(each)),
        late_ms=1000 * max((outcome.late_s for outcome in outcomes), default=0.0),
    )


def _by_code(outcomes: Iterable[Outcome], kind: str) -> dict[str, int]:
    return dict(sorted(Counter(outcome.code for outcome in outcomes if outcome.kind == kind).items()))
