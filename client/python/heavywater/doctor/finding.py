"""One thing that was looked at."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """FAILED: it does not work. WARNING: it works, less well or not for long."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True)
class Finding:
    """`where`: a server or "this node"; `what`: one word for what was looked at."""

    where: str
    what: str
    verdict: Verdict
    text: str

    @property
    def failed(self) -> bool:
        return self.verdict is Verdict.FAILED


def gibibytes(count: float) -> str:
    return f"{count / (1 << 30):.1f} GiB"
