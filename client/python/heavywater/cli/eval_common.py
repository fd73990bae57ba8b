"""What the commands of `heavywater eval` have in common."""

from __future__ import annotations

import os
import shutil

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from heavywater.cli.policy import parse_recall_tokens
from heavywater.eval.rows import RecallTokens
from heavywater.local import LocalOptions

DEFAULT_RECALL_TOKENS = 64
_HOST_BYTES = 3 << 30


def local_servers(threads: int, *, recall: bool) -> LocalOptions:
    """Float32, one worker. The host tier may not exceed what the machine has for shared memory.

    Without recall, figures do not depend on what is demoted: what finds no room is dropped.
    """
    host_bytes = min(_HOST_BYTES, shutil.disk_usage("/dev/shm").free * 3 // 4)
    return LocalOptions(
        worker_flags={
            "kv_dtype": "fp32",
            "compute_threads": threads or os.cpu_count() or 1,
            "device_memory_bytes": 4 << 30,
            "on_host_full": "stop" if recall else "drop",
        },
        cache_flags={"host_bytes": host_bytes},
    )


def recall_of(text: str) -> RecallTokens:
    """What --recall-tokens says."""
    tokens, everything = parse_recall_tokens(text)
    return "all" if everything else tokens or DEFAULT_RECALL_TOKENS


def counted(number: int, noun: str) -> str:
    """ "1 window", "2 windows"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def fractions(text: str) -> list[float]:
    """A comma-separated list. Raises ValueError."""
    return [float(part) for part in text.split(",")]


def progress_bar(log: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=log)
