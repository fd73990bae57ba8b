"""Checks of servers that run: whether they answer, are ready, fit together, and have room."""

from __future__ import annotations

import email.utils
import http.client
import time

from grpc_health.v1 import health_pb2, health_pb2_grpc

from heavywater.client import Client
from heavywater.doctor.finding import Finding, fail, ok, warn
from heavywater.errors import HeavywaterError, translated
from heavywater.load.metrics import fetch_metrics, gauges
from heavywater.security import Security
from heavywater.version import __version__

_TIMEOUT_S = 5.0
_FULL = 0.9  # of a tier
_MAX_SKEW_S = 2.0  # HTTP gives whole seconds
_START = "heavywater serve starts servers and prints their addresses"


def check_worker(address: str) -> list[Finding]:
    what = f"worker {address}"
    try:
        if not _is_ready(address):
            advice = "its group waits for ranks, its weights are loading, or it drains: see its log"
            return [fail(what, "answers, and is not ready", advice)]
        with Client(worker=address, timeout_s=_TIMEOUT_S) as client:
            model = client.get_model()
    except HeavywaterError as error:
        if error.code == "UNIMPLEMENTED":
            return [ok(what, "ready; serves engines (model: none), or is not rank 0")]
        return [fail(what, str(error), f"is it there, and does a firewall let through? {_START}")]
    info = model.info
    ranks = "1 rank" if info.tensor_parallel == 1 else f"{info.tensor_parallel} ranks"
    findings = [ok(what, f"ready, {ranks}, {info.name}, context {info.context_tokens}, policy {info.default_policy}")]
    return findings + _of_version(what, info.server_version)


def check_cache(address: str) -> list[Finding]:
    what = f"cache service {address}"
    try:
        with Client(cache=address, timeout_s=_TIMEOUT_S) as client:
            stats = client.stats()
    except HeavywaterError as error:
        return [fail(what, str(error), f"is it there, and does a firewall let through? {_START}")]
    words = ", ".join(
        f"{count} {noun}{'' if count == 1 else 's'}"
        for count, noun in ((stats.groups, "group"), (stats.ranks, "rank"), (stats.sequences, "sequence"))
    )
    findings = [
        ok(what, words) if stats.ranks else warn(what, words, "no worker is a member: start some with --cache_address")
    ]
    for tier in stats.tiers:
        share = tier.used_bytes / tier.total_bytes if tier.total_bytes else 0.0
        line = f"{tier.tier} {share:.0%} of {tier.total_bytes / 2**30:.1f} GiB used"
        if tier.failures_corrupt or tier.failures_unavailable:
            bad = f"{line}; {tier.failures_corrupt} pages corrupt, {tier.failures_unavailable} times away"
            findings.append(warn(what, bad, "see the service's log, and the disk or Redis below it"))
        elif share > _FULL:
            findings.append(
                warn(what, line, "a larger tier (--host_bytes, --disk_bytes), one more below it, or shorter leases")
            )
        else:
            findings.append(ok(what, line))
    return findings + _of_version(what, stats.version)


def check_metrics(address: str) -> list[Finding]:
    """Of a rank: its link to the cache service, what it lost, and its clock."""
    what = f"metrics {address}"
    try:
        asked_s = time.time()
        date = _date(address)
        skew_s = 0.0 if date is None else date + 0.5 - (asked_s + time.time()) / 2
        text = fetch_metrics(address)
    except (OSError, ValueError, http.client.HTTPException) as error:
        return [fail(what, str(error), "is it metrics_address of a worker or of the cache service?")]
    findings = []
    if gauges(text, "heavywater_cache_service_up", "").get("", 1.0) < 1:
        findings.append(
            fail(what, "the rank cannot reach the cache service", "evicted tokens are dropped meanwhile; see its log")
        )
    failures = gauges(text, "heavywater_group_failures_total", "").get("", 0.0)
    if failures:
        findings.append(
            warn(what, f"its group has lost a rank {failures:.0f} times", "why did it end? see the ranks' logs")
        )
    if date is not None and abs(skew_s) > _MAX_SKEW_S:
        words = f"its clock is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} this machine's"
        findings.append(warn(what, words, "run NTP on both: logs and metrics of the two do not fit together"))
    return findings or [ok(what, "served; the clocks agree" if date is not None else "served")]


def _is_ready(address: str) -> bool:
    with translated(), Security.from_environment().channel(address, (("grpc.enable_retries", 0),)) as channel:
        request = health_pb2.HealthCheckRequest(service="readiness")
        answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=_TIMEOUT_S)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _of_version(what: str, version: str) -> list[Finding]:
    if version == __version__:
        return []
    return [warn(what, f"is version {version}, this client {__version__}", "run the same version on both sides")]


def _date(address: str) -> float | None:
    """The server's time, where it gives it; only whole seconds."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=_TIMEOUT_S)
    try:
        connection.request("HEAD", "/metrics")
        date = connection.getresponse().getheader("Date")
    finally:
        connection.close()
    return email.utils.parsedate_to_datetime(date).timestamp() if date else None
