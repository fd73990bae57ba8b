"""What a server's metrics say that its answers do not; and its clock."""

from __future__ import annotations

import re
import time
import urllib.request
from email.utils import parsedate_to_datetime

from heavywater.doctor.finding import Finding, Verdict

_MAX_BYTES = 16 << 20
_MAX_SKEW_S = 2.0  # the header has whole seconds
_SERIES = re.compile(r"^(heavywater_\w+)(\{.*\})? (\S+)$", flags=re.MULTILINE)

# Above 0 since the start of the process: (verdict, what it means).
_BAD = {
    "heavywater_checksum_failures_total": (Verdict.FAILED, "pages have changed in memory"),
    "heavywater_plan_disagreements_total": (Verdict.FAILED, "ranks have decided differently"),
    "heavywater_group_failures_total": (Verdict.WARNING, "times the group lost a rank"),
    "heavywater_reports_dropped": (Verdict.WARNING, "reports to the cache service were given up"),
}


def examine_metrics(address: str, timeout_s: float) -> list[Finding]:
    """Of the Prometheus endpoint at host:port. Raises OSError."""
    before = time.time()
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=timeout_s) as answer:
        text = answer.read(_MAX_BYTES).decode()
        date = answer.headers.get("Date", "")
    middle = (before + time.time()) / 2
    return [find_clock(address, date, middle), *find_counts(address, text)]


def find_clock(address: str, date: str, now_s: float) -> Finding:
    """The server's clock against this node's. Leases go by the cache service's alone: logs are what a skew spoils."""
    if not date:
        return Finding(address, "clock", Verdict.WARNING, "the endpoint does not tell the time")
    skew = parsedate_to_datetime(date).timestamp() + 0.5 - now_s
    if abs(skew) <= _MAX_SKEW_S:
        return Finding(address, "clock", Verdict.OK, f"within {_MAX_SKEW_S:.0f} s of this node's")
    return Finding(
        address, "clock", Verdict.WARNING, f"{abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} this node's"
    )


def find_counts(address: str, text: str) -> list[Finding]:
    """One finding for each count that should be 0, or one that says that all are."""
    findings = []
    for name, _, value in _SERIES.findall(text):
        if name in _BAD and float(value) > 0:
            verdict, meaning = _BAD[name]
            findings.append(Finding(address, "counts", verdict, f"{float(value):.0f} {meaning} ({name})"))
        if name == "heavywater_cache_service_up" and float(value) == 0:
            findings.append(Finding(address, "counts", Verdict.FAILED, f"this rank has no cache service ({name} is 0)"))
    if "heavywater_" not in text:
        return [Finding(address, "counts", Verdict.FAILED, "no metrics of this project: another server's endpoint?")]
    return findings or [Finding(address, "counts", Verdict.OK, "nothing that should be 0 is above it")]
