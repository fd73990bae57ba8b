"""What a check has found."""

from __future__ import annotations

from dataclasses import asdict, dataclass

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, how it is, and, where it is not well, what to do."""

    what: str
    state: str  # OK, WARN or FAIL
    found: str
    advice: str = ""

    def row(self) -> dict[str, str]:
        return asdict(self)


def ok(what: str, found: str) -> Finding:
    return Finding(what, OK, found)


def warn(what: str, found: str, advice: str) -> Finding:
    return Finding(what, WARN, found, advice)


def fail(what: str, found: str, advice: str) -> Finding:
    return Finding(what, FAIL, found, advice)
