"""Gauges of a server's Prometheus endpoint."""

from __future__ import annotations

import re
import urllib.request

_LINE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_TIMEOUT_S = 10.0
_MAX_BYTES = 16 << 20


def fetch_metrics(address: str) -> str:
    """What `host:port` serves. Raises OSError."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=_TIMEOUT_S) as answer:
        content: bytes = answer.read(_MAX_BYTES)
    return content.decode()


def gauges(text: str, name: str, label: str) -> dict[str, float]:
    """Values of a metric in Prometheus' text format, by the value of one of its labels."""
    values = {}
    for line in text.splitlines():
        found = _LINE.match(line)
        if found and found[1] == name:
            values[dict(_LABEL.findall(found[2] or "")).get(label, "")] = float(found[3])
    return values
