"""All that can be found out with the addresses that are known."""

from __future__ import annotations

from collections.abc import Sequence

from heavywater.doctor.finding import Finding, Verdict
from heavywater.doctor.metrics import examine_metrics
from heavywater.doctor.node import find_interfaces, find_name, find_shared_memory
from heavywater.doctor.servers import examine_cache, examine_worker, find_health
from heavywater.errors import HeavywaterError


def examine(
    cache: str = "", workers: Sequence[str] = (), metrics: Sequence[str] = (), timeout_s: float = 5.0
) -> list[Finding]:
    """Addresses are host:port; what is not given is not looked at."""
    findings = [find_interfaces()]
    for address in [*([cache] if cache else []), *workers]:
        findings.append(find_name(address))
        if findings[-1].failed:
            continue
        findings.append(find_health(address, timeout_s))
        if findings[-1].failed:
            continue
        try:
            findings += _ask(address, address == cache, timeout_s)
        except HeavywaterError as error:
            findings.append(Finding(address, "calls", Verdict.FAILED, str(error)))
    for address in metrics:
        try:
            findings += examine_metrics(address, timeout_s)
        except (OSError, ValueError) as error:
            findings.append(Finding(address, "metrics", Verdict.FAILED, f"cannot be read: {error}"))
    return findings


def _ask(address: str, is_cache: bool, timeout_s: float) -> list[Finding]:
    if not is_cache:
        return examine_worker(address, timeout_s)
    findings, config = examine_cache(address, timeout_s)
    return [*findings, find_shared_memory(config)]
