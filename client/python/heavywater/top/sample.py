"""One look at a deployment: the cache service's calls, and the metrics of each rank."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from heavywater.client import Client
from heavywater.load.metrics import fetch_metrics, gauges
from heavywater.v1 import admin_pb2, sequence_pb2

# A service may hold ten thousand sequences; so many are looked at.
MAX_SEQUENCES = 2000
_COUNTERS = {
    "tokens": "heavywater_tokens_generated_total",
    "prompt_tokens": "heavywater_prompt_tokens_total",
    "recall_reads": "heavywater_recall_reads_total",
    "promoted": "heavywater_promoted_total",
    "evicted": "heavywater_evicted_positions_total",
}
_STEPS = "heavywater_step_seconds"


@dataclass(frozen=True)
class RankSample:
    """One rank's metrics; `error` says why there are none."""

    address: str
    error: str = ""
    counters: dict[str, float] = field(default_factory=dict)
    positions: dict[str, float] = field(default_factory=dict)  # of running sequences: seen, resident, demoted, dropped
    device_bytes: dict[str, float] = field(default_factory=dict)  # by kind
    sequences: dict[str, float] = field(default_factory=dict)  # running, queued
    device_limit_bytes: float = 0.0
    mass_missing: float = 0.0
    decode_steps: float = 0.0
    decode_seconds: float = 0.0
    cache_up: bool = True
    group_failures: float = 0.0

    @property
    def device_used_bytes(self) -> float:
        return sum(self.device_bytes.values())


@dataclass(frozen=True)
class Sample:
    """What was seen at one time. Sequences that still run come first, then the newest."""

    at_s: float  # of time.monotonic()
    stats: admin_pb2.StatsResponse
    sequences: Sequence[sequence_pb2.Sequence]
    ranks: Sequence[RankSample]


def take_sample(
    client: Client, metrics_addresses: Sequence[str], fetch: Callable[[str], str] = fetch_metrics
) -> Sample:
    """Raises HeavywaterError when the cache service cannot be asked. A rank that cannot says so in its sample."""
    stats = client.stats()
    sequences = list(itertools.islice(client.list(), MAX_SEQUENCES))
    sequences.sort(key=lambda one: (one.finished, -one.sequence_id))
    ranks = [_rank(address, fetch) for address in metrics_addresses]
    return Sample(time.monotonic(), stats, sequences, ranks)


def _rank(address: str, fetch: Callable[[str], str]) -> RankSample:
    try:
        text = fetch(address)
    except (OSError, ValueError) as error:
        return RankSample(address, error=str(error))

    def one(name: str, default: float = 0.0) -> float:
        return gauges(text, name, "").get("", default)

    return RankSample(
        address,
        counters={name: one(metric) for name, metric in _COUNTERS.items()},
        positions=gauges(text, "heavywater_positions", "state"),
        device_bytes=gauges(text, "heavywater_device_bytes", "kind"),
        sequences=gauges(text, "heavywater_sequences", "state"),
        device_limit_bytes=one("heavywater_device_limit_bytes"),
        mass_missing=one("heavywater_attention_mass_missing_ratio"),
        decode_steps=gauges(text, f"{_STEPS}_count", "phase").get("decode", 0.0),
        decode_seconds=gauges(text, f"{_STEPS}_sum", "phase").get("decode", 0.0),
        cache_up=one("heavywater_cache_service_up", 1.0) > 0,
        group_failures=one("heavywater_group_failures_total"),
    )
