"""The asyncio client against servers that answer as the API says: as the other client, awaited."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable

import heavywater
import numpy as np
import pytest
from client_fakes import HEAD_DIM, PIECES, FakeServers, kv_row
from heavywater import HeavywaterError, PolicyOptions, aio
from heavywater.retry import BACKOFFS_S


def run(servers: FakeServers, body: Callable[[aio.Client], Awaitable[None]], slept: list[float] | None = None) -> None:
    """Runs a test's body with a client that does not really sleep."""

    async def sleep(seconds: float) -> None:
        if slept is not None:
            slept.append(seconds)

    async def main() -> None:
        async with aio.Client(worker=servers.address, cache=servers.address, sleep=sleep) as client:
            await body(client)

    asyncio.run(asyncio.wait_for(main(), 30))


def test_both_clients_have_the_same_calls_and_arguments() -> None:
    def public(of: type) -> dict[str, list[str]]:
        calls = {name: call for name, call in vars(of).items() if callable(call) and not name.startswith("_")}
        return {name: list(inspect.signature(call).parameters) for name, call in calls.items()}

    assert public(aio.Client).items() >= public(heavywater.Client).items()
    assert public(aio.Generation) == public(heavywater.Generation)


def test_generate_streams_tokens_and_ends_with_the_summary(servers: FakeServers) -> None:
    async def body(client: aio.Client) -> None:
        async with client.generate([2, 3, 4], max_new_tokens=4) as generation:
            with pytest.raises(RuntimeError, match="last message"):
                _ = generation.summary
            tokens = [token async for token in generation]
        assert [(token.index, token.token) for token in tokens] == [(0, 3), (1, 4), (2, 5), (3, 6)]
        assert generation.sequence_id == 42
        assert generation.summary.finish_reason == "length"
        assert await client.generate([2, 3, 4], max_new_tokens=4).text() == "".join(PIECES[3:7])

    run(servers, body)


def test_generate_sends_what_it_was_given(servers: FakeServers) -> None:
    policy = PolicyOptions(policy="h2o", heavy_tokens=5, recent_tokens=3)

    async def body(client: aio.Client) -> None:
        sampling = {"temperature": 0.5, "top_p": 0.75, "top_k": 7, "seed": 9}
        await client.generate("abc", suffix=[2], max_new_tokens=1, policy=policy, tenant="t", **sampling).text()

    run(servers, body)
    (request,) = servers.worker.requests
    assert (request.text, request.policy, request.tenant) == ("abc", policy, "t")
    assert list(request.suffix_tokens) == [2]
    assert (request.sampling.temperature, request.sampling.seed) == (0.5, 9)
    assert (request.sampling.top_p, request.sampling.top_k) == (0.75, 7)


def test_fork_names_the_sequence_and_brings_a_request_id(servers: FakeServers) -> None:
    async def body(client: aio.Client) -> None:
        assert (await client.fork(7, lease_s=2.5)).sequence_id == 8
        await client.fork(7, request_id="mine")

    run(servers, body)
    first, second = servers.cache.forks
    assert (first.sequence_id, first.lease_ms, len(first.request_id)) == (7, 2500, 32)
    assert second.request_id == "mine"


def test_turns_suspend_resume_and_truncate_name_the_sequence(servers: FakeServers) -> None:
    async def body(client: aio.Client) -> None:
        await client.generate([1, 2, 3], max_new_tokens=1, continues=42).text()
        assert (await client.suspend(7, ttl_s=1.5)).ttl_ms == 1500
        assert (await client.truncate(7, 40)).tokens_seen == 39
        assert servers.cache.suspended == {7: 1500}
        await client.resume(7)

    run(servers, body)
    assert servers.worker.requests[0].continue_sequence_id == 42
    assert (servers.cache.suspended, servers.cache.truncated) == ({}, {7: 40})


def test_a_generation_that_breaks_off_goes_on_with_each_token_once(servers: FakeServers) -> None:
    servers.worker.breaks = [2, 2, 3]
    slept: list[float] = []

    async def body(client: aio.Client) -> None:
        tokens = [token async for token in client.generate([2, 3, 4], max_new_tokens=4)]
        assert [(token.index, token.token) for token in tokens] == [(0, 3), (1, 4), (2, 5), (3, 6)]

    run(servers, body, slept)
    resumed = [list(request.resume.received_tokens) for request in servers.worker.requests]
    assert resumed == [[], [3, 4], [3, 4], [3, 4, 5]]
    assert slept == [0.1, 0.2, 0.1]  # grows while nothing comes


def test_a_generation_that_was_never_accepted_is_not_repeated(servers: FakeServers) -> None:
    servers.worker.down = True

    async def body(client: aio.Client) -> None:
        with pytest.raises(HeavywaterError, match="not complete") as caught:
            await client.generate([2], max_new_tokens=1).wait_accepted()
        assert caught.value.code == "UNAVAILABLE"

    run(servers, body)
    assert len(servers.worker.requests) == 1


def test_leaving_a_generation_early_cancels_the_call(servers: FakeServers) -> None:
    async def body(client: aio.Client) -> None:
        async with client.generate([2], max_new_tokens=10_000_000) as generation:
            assert await generation.wait_accepted() == 42
            async for _ in generation:
                break
        assert await asyncio.to_thread(servers.worker.cancelled.wait, 5)

    run(servers, body)


def test_who_reads_on_after_cancel_is_told_and_not_cancelled(servers: FakeServers) -> None:
    async def body(client: aio.Client) -> None:
        generation = client.generate([2], max_new_tokens=10_000_000)
        with pytest.raises(HeavywaterError) as caught:
            async for _ in generation:
                generation.cancel()
        assert caught.value.code == "CANCELLED"

    run(servers, body)


def test_a_task_that_is_cancelled_while_it_reads_is_cancelled(servers: FakeServers) -> None:
    async def body(client: aio.Client) -> None:
        begun = asyncio.Event()

        async def read() -> None:
            async with client.generate([2], max_new_tokens=10_000_000) as generation:
                async for _ in generation:
                    begun.set()

        task = asyncio.create_task(read())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(servers.worker.cancelled.wait, 5)

    run(servers, body)


def test_reads_are_repeated_while_the_server_is_unavailable_and_mutations_are_not(servers: FakeServers) -> None:
    servers.cache.unavailable = servers.worker.unavailable = 2
    slept: list[float] = []

    async def body(client: aio.Client) -> None:
        assert (await client.get_model()).info.name == "tiny"
        assert len((await client.get(7)).tokens) == 20  # three pages
        servers.cache.unavailable = 1
        with pytest.raises(HeavywaterError, match="draining"):
            await client.close(7)

    run(servers, body, slept)
    assert slept == [*BACKOFFS_S[:2], *BACKOFFS_S[:2]]
    assert servers.cache.closed == []


def test_sets_pages_and_lists_are_those_of_the_other_client(servers: FakeServers) -> None:
    with heavywater.Client(cache=servers.address) as other:
        sets = other.get_sets(7)

    async def body(client: aio.Client) -> None:
        ours = await client.get_sets(7)
        assert [one.demoted.tolist() for one in ours] == [one.demoted.tolist() for one in sets]
        assert [one.sequence_id async for one in client.list()] == [0, 1, 2, 3, 4]
        keys, values = await client.read(await client.get(7), 0, 1, first_position=3, num_positions=2)
        assert keys.shape == values.shape == (2, HEAD_DIM)
        np.testing.assert_array_equal(values[1], kv_row(4)[1])
        servers.cache.corrupt = True
        with pytest.raises(HeavywaterError, match="DATA_LOSS"):
            await client.read(await client.get(7), 0, 1, first_position=3, num_positions=2)

    run(servers, body)


def test_a_call_without_its_address_names_it() -> None:
    async def main() -> None:
        async with aio.Client() as client:
            assert not client.has_cache
            with pytest.raises(ValueError, match="worker"):
                client.generate("a")
            with pytest.raises(ValueError, match="cache"):
                await client.stats()

    asyncio.run(main())
