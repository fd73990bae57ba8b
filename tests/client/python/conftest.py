"""Fixtures of the Python client's tests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from client_fakes import FakeServers, fake_servers
from heavywater import Client
from heavywater.local import LocalOptions, LocalServers

WORKER_FLAGS = {"kv_dtype": "fp32", "metrics_address": "127.0.0.1:0"}
CACHE_FLAGS = {"host_bytes": 2 << 30}  # room for a hundred sequences at once


@pytest.fixture
def servers() -> Iterator[FakeServers]:
    with fake_servers() as running:
        yield running


@pytest.fixture
def sleeps() -> list[float]:
    """What the client would have slept."""
    return []


@pytest.fixture
def client(servers: FakeServers, sleeps: list[float]) -> Iterator[Client]:
    with Client(worker=servers.address, cache=servers.address, sleep=sleeps.append) as connected:
        yield connected


@pytest.fixture(scope="session")
def local_servers() -> Iterator[LocalServers]:
    """A real cache service and one real worker."""
    for binary in ("heavywater-cache", "heavywater-worker"):
        if shutil.which(binary) is None:
            pytest.skip(f"{binary} is not on PATH: run through deploy/local/test or deploy/local/run")
    with LocalServers(LocalOptions(worker_flags=WORKER_FLAGS, cache_flags=CACHE_FLAGS)) as running:
        yield running
