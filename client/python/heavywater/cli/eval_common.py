"""What the commands of `heavywater eval` have in common."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from heavywater.book import read_book
from heavywater.cli.policy import parse_recall_tokens
from heavywater.cli.prompt import text_of
from heavywater.eval.rows import RecallTokens
from heavywater.local import LocalOptions

DEFAULT_RECALL_TOKENS = 64
_HOST_BYTES = 3 << 30


BookText = Annotated[Path | None, typer.Option(help="A text file [Northanger Abbey, of Debian's r-cran-janeaustenr].")]
Parallel = Annotated[int, typer.Option(min=1, help="Sequences that run at once.")]
HeadBudgets = Annotated[
    str,
    typer.Option(
        help="even, adaptive (a layer's slots divided among its KV heads by scores) or both, where that can be."
    ),
]
Threads = Annotated[int, typer.Option(min=0, help="Of the worker it starts [all cores].")]


def text_or_book(text: Path | None) -> str:
    """What --text names."""
    return text_of("--text", text) if text else read_book()


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
    """What --budgets says, a comma-separated list. Raises ValueError."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--budgets {text}, want fractions with commas between") from None


def whole_numbers(option: str, text: str) -> list[int]:
    """A comma-separated list. Raises ValueError naming the option."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"{option} {text}, want whole numbers with commas between")
    return [int(part) for part in parts]


def progress_bar(log: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=log)
