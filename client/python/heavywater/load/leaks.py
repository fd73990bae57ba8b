"""What servers hold before a load and after it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from heavywater.client import Client
from heavywater.load.metrics import fetch_metrics, gauges
from heavywater.server_process import ServerProcess

# Of the worker's device memory: what each step needs, which may stay at its largest.
_WORKING_KINDS = frozenset({"workspace", "scratch"})
# Pages that are on their way when a client leaves belong to the sequence until they have arrived.
SETTLE_S = 20.0
_POLL_S = 0.25
# By how much a process may grow over the last three quarters of the sequences: allocators keep
# some of what they have had, and a batch may be the largest so far at any time.
MEMORY_SLACK_BYTES = 32 << 20
_ANONYMOUS = re.compile(r"^RssAnon:\s+(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True)
class Holdings:
    """By name, in bytes or sequences. Equal before and after a load that has left nothing behind."""

    counts: Mapping[str, int]
    working: Mapping[str, int] = field(default_factory=dict)  # shown, and not compared

    def more_than(self, before: Holdings) -> list[str]:
        """Names of what there is more of now."""
        return [name for name, count in self.counts.items() if count > before.counts.get(name, 0)]


def holdings(client: Client, metrics_addresses: Sequence[str]) -> Holdings:
    """Of the cache service's tiers and registry and, rank by rank, of workers by their metrics."""
    stats = client.stats()
    counts = {"sequences": stats.sequences}
    for tier in stats.tiers:
        counts[f"{tier.tier}.used_bytes"] = tier.used_bytes
        counts[f"{tier.tier}.unaccounted_bytes"] = abs(tier.total_bytes - tier.used_bytes - tier.free_bytes)
    working: dict[str, int] = {}
    for rank, address in enumerate(metrics_addresses):
        text = fetch_metrics(address)
        for state, number in gauges(text, "heavywater_sequences", "state").items():
            counts[f"rank{rank}.{state}_sequences"] = int(number)
        for kind, number in gauges(text, "heavywater_device_bytes", "kind").items():
            into = working if kind in _WORKING_KINDS else counts
            into[f"rank{rank}.{kind}_bytes"] = int(number)
    return Holdings(counts, working)


def settled(before: Holdings, now: Callable[[], Holdings], settle_s: float = SETTLE_S) -> Holdings:
    """What is held once nothing is more than before, or `settle_s` later."""
    deadline_s = time.monotonic() + settle_s
    while True:
        after = now()
        if not after.more_than(before) or time.monotonic() >= deadline_s:
            return after
        time.sleep(_POLL_S)


def anonymous_bytes(pid: int) -> int:
    """Memory of a process of this machine without files and shared memory (Linux). Raises OSError."""
    found = _ANONYMOUS.search(Path(f"/proc/{pid}/status").read_text())
    return 1024 * int(found[1]) if found else 0


class MemoryWatch:
    """Memory of processes at the start, after each quarter of the sequences, and at the end."""

    def __init__(
        self,
        processes: Sequence[ServerProcess],
        sequences: int,
        measure: Callable[[int], int] = anonymous_bytes,
    ) -> None:
        self._processes = processes
        self._measure = measure
        self._left = [sequences * quarter // 4 for quarter in (1, 2, 3)]
        self._ended = 0
        self.samples: list[list[int]] = [[] for _ in processes]
        self._sample()

    def note_end(self) -> None:
        """Of one sequence."""
        self._ended += 1
        while self._left and self._ended >= self._left[0]:
            self._left.pop(0)
            self._sample()

    def finish(self) -> None:
        """After the last sequence, when nothing runs."""
        self._sample()

    def by_process(self) -> dict[str, list[int]]:
        return {self._name(index): samples for index, samples in enumerate(self.samples)}

    def grown(self, slack_bytes: int = MEMORY_SLACK_BYTES) -> list[str]:
        """Processes whose memory at the end exceeds that after the first quarter by more than the slack."""
        return [
            self._name(index)
            for index, samples in enumerate(self.samples)
            if len(samples) > 2 and samples[-1] - samples[1] > slack_bytes
        ]

    def _name(self, index: int) -> str:
        return f"{self._processes[index].name} {index}"

    def _sample(self) -> None:
        for process, samples in zip(self._processes, self.samples, strict=True):
            samples.append(self._measure(process.pid))
