"""Addresses and interfaces of ranks on several nodes (nodes.py): what works, and what the error names."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster import Process, cluster, plaintext, token_ids
from nodes import Network, Node, network

PORT = 7701
FULL = {"policy": "full"}


@pytest.fixture
def net() -> Iterator[Network]:
    with network() as made:
        yield made


@contextmanager
def _worker(folder: Path, node: Node, **flags: object) -> Iterator[Process]:
    """Rank 0 of 3, alone."""
    common = {
        "size": 3,
        "model": os.environ["HEAVYWATER_MODEL"],
        "listen_address": f"{node.host.address}:0",
        "comm_address": node.host.address,
        **plaintext(node.host.address),
        "cache_address": f"{node.host.address}:1",
    }
    process = Process("heavywater-worker", {**common, **flags}, folder / "worker.log", node.host)
    try:
        yield process
    finally:
        process.close()


def _wait_until(what: str, condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_an_interface_instead_of_an_address_and_ranks_that_listen_everywhere(
    net: Network, folder: Path, expected: list[dict[str, object]]
) -> None:
    a, b = net.add("a"), net.add("b")
    hosts = [a.host, a.host, b.host]
    everywhere: dict[str, object] = {"comm_interface": "eth0", "comm_address": "unused"}
    per_rank: dict[int, dict[str, object]] = {
        rank: {
            **everywhere,
            "listen_address": f"0.0.0.0:{PORT + rank}",
            "advertised_address": f"{host.address}:{PORT + rank}",
        }
        for rank, host in enumerate(hosts)
    }
    # Nobody is there: the group works, and whoever asks rank 1 whether it lives says so.
    nowhere = f"{a.host.address.rpartition('.')[0]}.250:9"
    per_rank[1]["advertised_address"] = nowhere
    case = expected[0]
    kwargs = {"worker": {"kv_dtype": "fp32"}, "per_rank": per_rank, "hosts": hosts, "cache_host": a.host}
    with cluster(folder, 3, **kwargs) as group:
        messages = group.generate(tokens=case["prompt_ids"], max_new_tokens=8, ignore_eos=True, policy=FULL)
        assert token_ids(messages) == case["ids"][:8]  # type: ignore[index]
        log = group.workers[0].log
        _wait_until("nobody says that rank 1 cannot be asked", lambda: nowhere in log.read_text())
        assert "advertised_address" in log.read_text()


@pytest.mark.parametrize("field", ["comm_interface", "comm_address"])
def test_what_this_machine_does_not_have_is_named_at_once(net: Network, folder: Path, field: str) -> None:
    a, b = net.add("a"), net.add("b")
    wrong = {"comm_interface": "eth7", "comm_address": b.host.address}[field]
    with _worker(folder, a, **{field: wrong}) as worker:
        _wait_until("it waits for other ranks", lambda: not worker.alive())
        assert worker.terminate() == 1
        assert wrong in worker.tail()
        assert "eth0" in worker.tail(), "what there is instead is not named"


def test_ranks_that_exchange_over_loopback_on_two_nodes_name_the_address(net: Network, folder: Path) -> None:
    a, b = net.add("a"), net.add("b")
    # comm_address as it is by default.
    worker = {"comm_address": "127.0.0.1", "comm_timeout_ms": 3000, "reform_timeout_ms": 0}
    started = cluster(folder, 3, worker=worker, hosts=[a.host, a.host, b.host], cache_host=a.host)
    with pytest.raises(RuntimeError, match=r"rank \d at 127\.0\.0\.1:\d+"), started:
        pass


def test_a_cache_service_that_cannot_be_reached_is_named_while_it_is_looked_for(net: Network, folder: Path) -> None:
    a, b = net.add("a"), net.add("b")
    b.unplug()
    away = f"{b.host.address}:7700"
    with _worker(folder, a, cache_address=away) as worker:
        _wait_until("it says nothing", lambda: f'cache="{away}"' in worker.tail(), 60)
        assert worker.alive()
