"""Runs one program with its output in a log, and ends all of it when its time is up."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Ended:
    """How a program ended; `code` None: it was still running when its time was up."""

    code: int | None
    seconds: float


def run_logged(
    command: Sequence[str | Path], log: Path, timeout_s: float, environment: Mapping[str, str] | None = None
) -> Ended:
    """Standard output and error go to the log."""
    start = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        code: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(max(timeout_s, 0.1))
        finally:
            # Children of a program that has ended may still run.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return Ended(code, time.monotonic() - start)


def tail(log: Path, lines: int = 30) -> str:
    """The end of a log."""
    return "\n".join("  " + line for line in log.read_text(errors="replace").splitlines()[-lines:])
