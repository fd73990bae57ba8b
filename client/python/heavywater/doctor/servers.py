"""The servers: do they answer, are they ready, do they fit each other."""

from __future__ import annotations

import time

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from heavywater.client import Client
from heavywater.doctor.finding import Finding, Verdict, gibibytes
from heavywater.errors import HeavywaterError, translated
from heavywater.v1 import admin_pb2
from heavywater.version import __version__

_SLOW_S = 0.05
_NEARLY_FULL = 0.95


def find_health(address: str, timeout_s: float) -> Finding:
    """Ready, alive but not ready, or out of reach; and how long an answer takes."""
    try:
        with translated(), grpc.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            stub.Check(health_pb2.HealthCheckRequest(service="liveness"), timeout=timeout_s)
            start = time.monotonic()
            ready = stub.Check(health_pb2.HealthCheckRequest(service="readiness"), timeout=timeout_s).status
            took = time.monotonic() - start
    except HeavywaterError as error:
        return Finding(address, "health", Verdict.FAILED, f"does not answer: {error}")
    if ready != health_pb2.HealthCheckResponse.SERVING:
        text = "alive and not ready: its group is not complete, it drains, or it waits for the cache service"
        return Finding(address, "health", Verdict.FAILED, text)
    verdict = Verdict.OK if took < _SLOW_S else Verdict.WARNING
    return Finding(address, "health", verdict, f"ready, answers in {took * 1000:.1f} ms")


def find_version(address: str, version: str) -> Finding:
    """Whether a server has the version of this command."""
    if version == __version__:
        return Finding(address, "version", Verdict.OK, version)
    return Finding(address, "version", Verdict.WARNING, f"the server has {version}, this command {__version__}")


def find_tier(address: str, tier: admin_pb2.TierStats) -> Finding:
    """How full a tier is, and what has failed there since the start."""
    broken = {"corrupt": tier.failures_corrupt, "missing": tier.failures_missing, "other": tier.failures_other}
    away = tier.failures_unavailable
    used = tier.used_bytes / max(1, tier.total_bytes)
    text = f"{used:.0%} of {gibibytes(tier.total_bytes)} used"
    what = f"tier {tier.tier}"
    bad = [f"{count} {reason}" for reason, count in broken.items() if count]
    if bad:
        return Finding(address, what, Verdict.FAILED, f"{text}; pages lost since the start: {', '.join(bad)}")
    if away:
        return Finding(address, what, Verdict.WARNING, f"{text}; it was unavailable for {away} pages since the start")
    if tier.reservations_refused:
        refused = f"{tier.reservations_refused} reservations refused since the start"
        return Finding(address, what, Verdict.WARNING, f"{text}; {refused}")
    return Finding(address, what, Verdict.WARNING if used > _NEARLY_FULL else Verdict.OK, text)


def find_members(address: str, stats: admin_pb2.StatsResponse) -> Finding:
    """Whether ranks have joined."""
    text = f"{stats.ranks} ranks in {stats.groups} groups, {stats.sequences} sequences"
    if stats.ranks:
        return Finding(address, "members", Verdict.OK, text)
    return Finding(address, "members", Verdict.WARNING, f"{text}: no worker has joined")


def find_listening(address: str, config: dict[str, str]) -> Finding:
    """Whether ranks of other nodes can reach the cache service at all."""
    bound = config.get("listen_address", "")
    if bound.startswith(("127.", "localhost:", "[::1]")):
        text = f"listens on {bound}: ranks of other nodes cannot reach it"
        return Finding(address, "listen_address", Verdict.WARNING, text)
    return Finding(address, "listen_address", Verdict.OK, bound)


def flat_yaml(text: str) -> dict[str, str]:
    """GetConfig's answer: one `key: value` a line, strings in quotes."""
    pairs = (line.partition(": ") for line in text.splitlines() if ": " in line)
    return {key: value.strip().strip('"') for key, _, value in pairs}


def examine_cache(address: str, timeout_s: float) -> tuple[list[Finding], dict[str, str]]:
    """What a cache service says of itself, and its configuration."""
    with Client(cache=address, timeout_s=timeout_s) as client:
        stats = client.stats()
        config = flat_yaml(client.get_config())
    findings = [find_version(address, stats.version), find_members(address, stats), find_listening(address, config)]
    return findings + [find_tier(address, tier) for tier in stats.tiers], config


def examine_worker(address: str, timeout_s: float) -> list[Finding]:
    """What rank 0 of a group says of its model."""
    with Client(worker=address, timeout_s=timeout_s) as client:
        info = client.get_model().info
    text = f"{info.name} ({info.architecture}), {info.tensor_parallel} ranks, default policy {info.default_policy}"
    return [find_version(address, info.server_version), Finding(address, "model", Verdict.OK, text)]
