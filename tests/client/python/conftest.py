"""Fixtures of the Python client's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from client_fakes import FakeServers, fake_servers
from heavywater import Client


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
