"""A crowd of bad clients: the service stays up, answers good ones, does not grow, and leaks nothing."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import certificates
import grpc
import pytest
from cluster import Cluster, cluster
from heavywater import Client, HeavywaterError, Security
from heavywater.v1 import generation_pb2, generation_pb2_grpc, page_store_pb2, page_store_pb2_grpc

# What a crowd may leave behind: allocators and gRPC's own pools keep some of what they had.
GROWTH_BYTES = 96 << 20
REPEATED_GROWTH_BYTES = 32 << 20
CROWD = 2000
STREAMS = 10_000
TOKENS = {
    "token-of-a": "client team-a",
    "token-of-b": "client team-b",
    "token-of-admin": "admin *",
    "worker": "worker *",
}
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> certificates.Authority:
    return certificates.Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory, authority: certificates.Authority) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("bad_clients")
    cert, key = authority.sign("server")
    common = {
        "tls_cert_file": cert,
        "tls_key_file": key,
        "tokens_file": certificates.tokens_file(folder, TOKENS),
        "max_connections": CROWD + 500,
    }
    with cluster(
        folder,
        1,
        cache={**common, "metrics_address": "127.0.0.1:0", "host_bytes": 64 << 20},
        worker={
            **common,
            "tls_ca_file": authority.ca,
            "token_file": certificates.token_file(folder, "worker", "worker"),
        },
        security=Security(ca_file=authority.ca),
    ) as started:
        yield started


@pytest.fixture(autouse=True)
def nothing_is_left(group: Cluster, authority: certificates.Authority) -> Iterator[None]:
    """Before and after each crowd: the service answers, and holds in memory and tier what it held."""
    good(group, authority)
    before, used = resident_bytes(group), used_bytes(group, authority)
    yield
    good(group, authority)
    deadline = time.monotonic() + 20
    while resident_bytes(group) > before + GROWTH_BYTES and time.monotonic() < deadline:
        time.sleep(0.5)
    assert resident_bytes(group) <= before + GROWTH_BYTES
    assert used_bytes(group, authority) == used


def client(group: Cluster, authority: certificates.Authority, token: str) -> Client:
    security = Security(ca_file=authority.ca, token=token)
    return Client(group.worker_address, group.cache_address, security=security, timeout_s=20)


def good(group: Cluster, authority: certificates.Authority) -> None:
    """A good client's whole errand."""
    with client(group, authority, "token-of-a") as one:
        generation = one.generate([504, 260, 253], max_new_tokens=2, ignore_eos=True)
        assert len(list(generation)) == 2
        one.close(generation.sequence_id)


def used_bytes(group: Cluster, authority: certificates.Authority) -> int:
    with client(group, authority, "token-of-admin") as admin:
        deadline = time.monotonic() + 20
        while admin.stats().sequences and time.monotonic() < deadline:
            time.sleep(0.1)  # the last rank's heartbeat frees the pages of what has ended
        time.sleep(1.5)
        return admin.stats().tiers[0].used_bytes


def resident_bytes(group: Cluster) -> int:
    """Of the cache service."""
    assert group.cache is not None
    status = Path(f"/proc/{group.cache.pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found
    return int(found.group(1)) << 10


def address_of(group: Cluster) -> tuple[str, int]:
    host, _, port = group.cache_address.rpartition(":")
    return host, int(port)


@contextlib.contextmanager
def crowd_of_sockets(group: Cluster, count: int) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(address_of(group), timeout=10)) for _ in range(count)]


def ended(connection: socket.socket) -> bool:
    """Whether the server has closed it, within the time-out."""
    try:
        while connection.recv(4096):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def test_plaintext_to_tls(group: Cluster) -> None:
    def refused(_: int) -> None:
        plain = Client(cache=group.cache_address, security=Security(), timeout_s=5)
        with plain, pytest.raises(HeavywaterError):
            plain.get(1)

    with ThreadPoolExecutor(25) as clients:
        assert len(list(clients.map(refused, range(50)))) == 50


def test_garbage_bytes(group: Cluster, authority: certificates.Authority) -> None:
    for size in (1, 9, 24, 4096, 1 << 20):
        for _ in range(20):
            with socket.create_connection(address_of(group), timeout=10) as raw, contextlib.suppress(OSError):
                raw.sendall(os.urandom(size))
    context = ssl.create_default_context(cafile=str(authority.ca))
    context.set_alpn_protocols(["h2"])
    for garbage in (PREFACE + os.urandom(4096), os.urandom(4096), PREFACE + SETTINGS + b"\xff" * 4096):
        for _ in range(20):
            with socket.create_connection(address_of(group), timeout=10) as raw, contextlib.suppress(OSError):
                context.wrap_socket(raw, server_hostname="server").sendall(garbage)


def test_connections_that_say_nothing_are_cut_off(group: Cluster, authority: certificates.Authority) -> None:
    with crowd_of_sockets(group, 500) as connections:
        good(group, authority)
        connections[0].settimeout(15)
        assert ended(connections[0]), "a handshake has 10 s"


def test_a_crowd_of_idle_connections(group: Cluster, authority: certificates.Authority) -> None:
    held = []
    for _ in range(4):
        with crowd_of_sockets(group, CROWD):
            good(group, authority)
        time.sleep(1)
        held.append(resident_bytes(group))
    assert held[3] - held[1] < REPEATED_GROWTH_BYTES, "what one crowd leaves, the next one uses"


def test_more_connections_than_there_may_be(group: Cluster, authority: certificates.Authority) -> None:
    with client(group, authority, "token-of-a") as before:
        assert list(before.list()) == []
        with crowd_of_sockets(group, CROWD + 600) as connections:
            connections[-1].settimeout(10)
            assert ended(connections[-1]), "it is closed at once"
            assert list(before.list()) == [], "who is there stays"


def test_a_crowd_of_idle_streams(group: Cluster, authority: certificates.Authority) -> None:
    """Streams of rows that never come, several connections of them."""
    script = str(Path(__file__).with_name("idle_streams.py"))
    arguments = [group.cache_address, str(authority.ca), "worker", str(STREAMS)]
    with subprocess.Popen(
        [sys.executable, script, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as streams:
        assert streams.stdin is not None and streams.stdout is not None
        assert streams.stdout.readline() == "open\n"
        good(group, authority)
        streams.stdin.close()
        assert streams.wait(timeout=120) == 0, "none of them has ended"


def test_wrong_tokens_and_other_tenants_ids(group: Cluster, authority: certificates.Authority) -> None:
    with client(group, authority, "token-of-a") as a:
        generation = a.generate([504, 260, 253], max_new_tokens=2, ignore_eos=True)
        list(generation)
        with client(group, authority, "token-of-nobody") as nobody, client(group, authority, "token-of-b") as b:
            for guess in range(300):
                with pytest.raises(HeavywaterError) as refused:
                    nobody.get(generation.sequence_id)
                assert refused.value.code == "UNAUTHENTICATED"
                with pytest.raises(HeavywaterError) as refused:
                    b.get(generation.sequence_id + guess)
                assert refused.value.code == "NOT_FOUND"
        a.close(generation.sequence_id)
    assert group.cache is not None
    refusals = group.cache.log.read_text().count("call refused")
    assert 1 <= refusals <= 200, "a flood of refusals is not a flood of lines"


def test_oversize_messages(group: Cluster, authority: certificates.Authority) -> None:
    channel = Security(ca_file=authority.ca, token="worker").channel(group.cache_address)
    stub = page_store_pb2_grpc.PageStoreServiceStub(channel)
    for mebibytes in (5, 64, 256):
        chunk = page_store_pb2.WriteRequest(sequence_id=1, rows=b"x" * (mebibytes << 20))
        with pytest.raises(grpc.RpcError) as refused:
            stub.Write(iter([chunk]), timeout=60)
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED, refused.value
    channel.close()


def test_a_client_that_reads_nothing_loses_its_place_to_others(folder: Path) -> None:
    request = generation_pb2.GenerateRequest(
        text="Once upon a time", max_new_tokens=3000, ignore_eos=True, return_logits=True
    )
    request.policy.policy = "streaming"
    worker = {"max_batch": 1, "client_stall_ms": 1500}
    with cluster(folder, 1, worker=worker) as group, grpc.insecure_channel(group.worker_address) as channel:
        stalled = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request)
        next(stalled)
        with Client(worker=group.worker_address, cache=group.cache_address) as client:
            tokens = list(client.generate(list(range(10, 20)), max_new_tokens=4, ignore_eos=True))
        assert len(tokens) == 4
        with pytest.raises(grpc.RpcError) as ended:
            list(stalled)
        assert ended.value.code() == grpc.StatusCode.CANCELLED
        assert "the client has read nothing for 1.5s" in group.workers[0].log.read_text()
