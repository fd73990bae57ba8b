"""A real cache service alone, for tests of what needs no worker."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from heavywater.server_process import ServerProcess

START_S = 60.0


@contextmanager
def cache_service(folder: Path, **flags: object) -> Iterator[tuple[str, ServerProcess]]:
    """Its address and process; skips where it is not built."""
    if shutil.which("heavywater-cache") is None:
        pytest.skip("heavywater-cache is not on PATH: run through deploy/local/test or deploy/local/run")
    merged = {"listen_address": "127.0.0.1:0", "metrics_address": "", **flags}
    process = ServerProcess(
        "heavywater-cache", [f"--{name}={value}" for name, value in merged.items()], folder / "cache.log"
    )
    try:
        yield process.wait_for_address(time.monotonic() + START_S), process
    finally:
        process.kill()
