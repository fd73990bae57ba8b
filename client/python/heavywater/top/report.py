"""The same figures for programs."""

from __future__ import annotations

from heavywater.top.rates import RankRates, Rates
from heavywater.top.sample import RankSample, Sample
from heavywater.v1 import sequence_pb2


def as_json(sample: Sample, rates: Rates) -> dict[str, object]:
    """Bytes, tokens, milliseconds, and per second; the names of the metrics where they are theirs."""
    stats = sample.stats
    return {
        "service": {
            "version": stats.version,
            "uptime_ms": stats.uptime_ms,
            "groups": stats.groups,
            "ranks": stats.ranks,
            "sequences": stats.sequences,
        },
        "tokens_per_s": rates.total_tokens_per_s,
        "tiers": [
            {
                "tier": tier.tier,
                "total_bytes": tier.total_bytes,
                "used_bytes": tier.used_bytes,
                "pages": tier.pages,
                "hits": tier.hits,
                "moved_down": tier.moved_down,
                "moved_up": tier.moved_up,
                "reservations_refused": tier.reservations_refused,
                "failures": failures_of(tier),
            }
            for tier in stats.tiers
        ],
        "ranks": [_rank_json(rank, rate) for rank, rate in zip(sample.ranks, rates.ranks, strict=True)],
        "sequences": [_sequence_json(one, rates) for one in sample.sequences],
    }


def failures_of(tier: object) -> int:
    """Pages that a tier could not store, read or erase, for whatever reason."""
    kinds = ("full", "unavailable", "corrupt", "missing", "other")
    return sum(int(getattr(tier, f"failures_{kind}")) for kind in kinds)


def _rank_json(rank: RankSample, rates: RankRates) -> dict[str, object]:
    if rank.error:
        return {"address": rank.address, "error": rank.error}
    return {
        "address": rank.address,
        "running": int(rank.sequences.get("running", 0)),
        "queued": int(rank.sequences.get("queued", 0)),
        "positions": {state: int(count) for state, count in rank.positions.items()},
        "device_bytes": {kind: int(count) for kind, count in rank.device_bytes.items()},
        "device_limit_bytes": int(rank.device_limit_bytes),
        "mass_missing": rank.mass_missing,
        "cache_up": rank.cache_up,
        "group_failures": int(rank.group_failures),
        "step_ms": rates.step_ms,
        "steps_per_s": rates.steps_per_s,
        **{f"{name}_per_s": rate for name, rate in rates.per_s.items()},
    }


def _sequence_json(one: sequence_pb2.Sequence, rates: Rates) -> dict[str, object]:
    return {
        "sequence_id": one.sequence_id,
        "group": one.group,
        "tenant": one.tenant,
        "policy": one.budget.policy,
        "scope": one.budget.scope,
        "recall": one.budget.recall,
        "running": not one.finished,
        "prompt_tokens": one.prompt_tokens,
        "tokens_seen": one.counts.tokens_seen,
        "resident_tokens": one.counts.tokens_resident,
        "demoted_tokens": one.counts.tokens_demoted,
        "dropped_tokens": one.counts.tokens_dropped,
        "host_bytes": one.host_bytes,
        "plan": one.committed_plan,
        "lease_remaining_ms": one.lease_remaining_ms,
        "tokens_per_s": rates.tokens_per_s.get(one.sequence_id, 0.0),
    }
