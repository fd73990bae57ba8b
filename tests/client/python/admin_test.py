"""What operators do: both clients and `heavywater admin`, against a server that answers as the API says."""

from __future__ import annotations

import asyncio
import inspect
import json

import pytest
from cli_test import run
from client_fakes import FakeServers
from heavywater import Client, HeavywaterError, aio
from heavywater.admin import AdminCalls
from heavywater.aio.admin import AdminCalls as AioAdminCalls
from heavywater.cli.admin import size_of
from heavywater.v1 import admin_pb2


def test_both_clients_have_the_same_calls_and_arguments() -> None:
    def public(of: type) -> dict[str, list[str]]:
        calls = {name: call for name, call in vars(of).items() if callable(call) and not name.startswith("_")}
        return {name: list(inspect.signature(call).parameters) for name, call in calls.items()}

    assert public(AioAdminCalls) == public(AdminCalls)
    assert len(public(AdminCalls)) == 9


def test_mutations_carry_what_they_were_given_and_a_request_id_each(client: Client, servers: FakeServers) -> None:
    tenant = client.set_quota("acme", host_bytes=5, sequences=2)
    assert (tenant.tenant, tenant.quota.host_bytes, tenant.own_quota) == ("acme", 5, True)
    client.set_quota("acme", use_default=True)
    assert client.pin(7, "me", 1.5).pins == 2
    assert client.unpin(7, "me").pins == 0
    assert client.drain(2.0, suspend=True).suspended_by_drain == 3
    client.undo_drain()
    assert client.flush(7).moved_bytes == 8192
    assert client.snapshot().sequences == 5
    asked = servers.cache.requests
    assert len({request.request_id for request in asked}) == len(asked) == 8
    assert not asked[1].HasField("quota") and asked[1].use_default
    assert (asked[2].sequence_id, asked[2].owner, asked[2].ttl_ms) == (7, "me", 1500)
    assert asked[3].unpin and asked[3].ttl_ms == 0
    assert (asked[4].deadline_ms, asked[4].suspend) == (2000, True)
    assert asked[5].undo
    assert client.get_config() == "host_bytes: 1000\ntenant_sequences: 9\n"
    with pytest.raises(HeavywaterError, match="NOT_FOUND"):
        client.pin(404, "me", 1.0)


def test_watch_streams_until_the_iterator_is_closed(client: Client, servers: FakeServers) -> None:
    messages = client.watch(0.25)
    assert [next(messages).events[0].number for _ in range(3)] == [1, 2, 3]
    messages.close()  # type: ignore[attr-defined]
    assert servers.cache.watch_ended.wait(10)
    assert servers.cache.requests[0].interval_ms == 250


def test_the_asyncio_client_does_the_same(servers: FakeServers) -> None:
    async def body() -> None:
        async with aio.Client(cache=servers.address) as client:
            assert (await client.set_quota("acme", lower_bytes=9)).quota.lower_bytes == 9
            assert (await client.pin(7, "me", 1.0)).pins == 2
            assert (await client.unpin(7, "me")).pins == 0
            assert (await client.drain(1.0)).running_sequences == 0
            await client.undo_drain()
            assert (await client.flush()).moved_bytes == 8192
            assert (await client.snapshot()).bytes == 1234
            assert await client.get_config() == "host_bytes: 1000\ntenant_sequences: 9\n"
            numbers = []
            async for message in client.watch(0.1):
                numbers.append(message.events[0].number)
                if len(numbers) == 2:
                    break
            assert numbers == [1, 2]

    asyncio.run(asyncio.wait_for(body(), 30))


def test_without_the_cache_services_address_both_say_so(servers: FakeServers) -> None:
    with Client(worker=servers.address) as client, pytest.raises(ValueError, match="cache"):
        client.snapshot()


def test_the_command_does_each_of_them_and_says_what_was_done(servers: FakeServers) -> None:
    def admin(*arguments: str) -> str:
        done = run("admin", *arguments, "--cache", servers.address)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "host: 250 of 1,000 bytes" in admin("stats")
    assert admin("quota", "acme") == 'tenant "acme": host 0 bytes, below 0 bytes, sequences 0 of 9 (default quota)\n'
    assert admin("quota", "acme", "--host", "4G") == (
        'tenant "acme": host 7 of 4,294,967,296 bytes, below 0 bytes, sequences 1 of 9\n'
    )
    assert admin("quota", "acme", "--sequences", "0", "--lower", "1K") == (
        'tenant "acme": host 7 of 4,294,967,296 bytes, below 0 of 1,024 bytes, sequences 1\n'
    )
    assert admin("quota", "acme").endswith("below 0 of 1,024 bytes, sequences 1\n")
    assert len([one for one in servers.cache.requests if isinstance(one, admin_pb2.SetQuotaRequest)]) == 2
    assert "tenant_sequences: 9" in admin("config")
    assert "2 pins" in admin("pin", "7", "--ttl", "60")
    assert "0 pins" in admin("unpin", "7")
    assert admin("drain") == "draining: 0 sequences run, 3 were suspended for it\n"
    assert admin("drain", "--undo") == "takes new work again\n"
    assert "8,192 bytes went down" in admin("flush")
    assert "5 sequences" in admin("snapshot")
    assert "pin  sequence 2" in admin("watch", "--count", "2")
    assert json.loads(admin("quota", "acme", "--json"))["own_quota"] is True


def test_a_drain_that_leaves_sequences_running_ends_with_a_status_of_its_own(servers: FakeServers) -> None:
    servers.cache.running = 2
    done = run("admin", "drain", "--deadline", "1", "--cache", servers.address)
    assert done.returncode == 3
    assert "2 sequences run" in done.stdout


@pytest.mark.parametrize(("text", "size"), [("0", 0), ("12", 12), ("1K", 1024), ("2MiB", 2 << 20), ("3gb", 3 << 30)])
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert size_of(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1", "1.5G", "1X"])
def test_other_sizes_are_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=f'"{text}" is no size'):
        size_of(text)
