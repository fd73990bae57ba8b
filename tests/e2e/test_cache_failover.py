"""A group whose cache service stays lost goes on at the next of its addresses, and nobody restarts it."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from cluster import Cluster, cluster, takes_long, until_available
from heavywater import Client
from test_lost_node import LEASE_MS, Site, _wait_until_told, site  # noqa: F401 (a fixture)
from test_turns import BOUNDED, OFTEN, RECALL, Conversation

FAILOVER_MS = 4000
LONG_FAILOVER_MS = 20000
SHORT = 40
LONG = 500  # still running when the group moves
LONGER = 900  # when it would, if there were where to


def _group(folder: Path, ranks: int, services: list[Cluster], failover_ms: int = FAILOVER_MS) -> Cluster:
    addresses = ",".join(service.cache_address for service in services)
    flags = {**OFTEN, "cache_address": addresses, "cache_failover_ms": failover_ms}
    return Cluster(folder, ranks, cache=None, worker=flags)


def _kill(service: Cluster) -> None:
    assert service.cache is not None
    service.cache.kill()


def _wait_for_log(group: Cluster, text: str) -> None:
    deadline = time.monotonic() + 30
    while text not in group.workers[0].log.read_text():
        assert time.monotonic() < deadline, text
        time.sleep(0.05)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=takes_long), 3])
def test_a_running_text_and_new_ones_go_on_at_the_next_cache_service(
    folder: Path, long_prompt: list[int], ranks: int
) -> None:
    with ExitStack() as stack:
        first, second = (stack.enter_context(cluster(folder / name, 0)) for name in ("a", "b"))
        group = _group(folder / "group", ranks, [first, second])
        stack.callback(group.close)
        client = stack.enter_context(Client(worker=group.worker_address, cache=second.cache_address))

        def text(tokens: int) -> list[int]:
            generation = client.generate(long_prompt[:100], max_new_tokens=tokens, ignore_eos=True, policy=RECALL)
            return [token.token for token in generation]

        undisturbed = text(LONG)
        disturbed = []
        for token in client.generate(long_prompt[:100], max_new_tokens=LONG, ignore_eos=True, policy=RECALL):
            disturbed.append(token.token)
            if len(disturbed) == 10:
                _kill(first)
        assert disturbed == undisturbed
        assert until_available(lambda: text(SHORT)) == undisturbed[:SHORT]
        assert all(worker.alive() for worker in group.workers)
        assert list(client.list()), "they are known to the second one"
        for worker in group.workers:
            log = worker.log.read_text()
            assert "the group goes on at another cache service" in log and second.cache_address in log
        # A rank that is lost now finds the others there, although its own list begins with the lost one.
        group.workers[ranks - 1].kill()
        group.restart_worker(ranks - 1)
        group.wait_ready(group.worker_address)
        assert until_available(lambda: text(SHORT)) == undisturbed[:SHORT]


def test_a_short_outage_moves_nobody(folder: Path, long_prompt: list[int]) -> None:
    with ExitStack() as stack:
        first, second = (stack.enter_context(cluster(folder / name, 0)) for name in ("a", "b"))
        group = _group(folder / "group", 1, [first, second], LONG_FAILOVER_MS)
        stack.callback(group.close)
        _kill(first)
        _wait_for_log(group, "cache service does not answer")
        first.restart_cache()
        with Client(worker=group.worker_address, cache=first.cache_address) as client:

            def text() -> list[int]:
                generation = client.generate(long_prompt[:20], max_new_tokens=4, ignore_eos=True, policy=BOUNDED)
                return [token.token for token in generation]

            assert len(until_available(text)) == 4
            assert list(client.list()), "they are known to the first one"
        assert "another cache service" not in group.workers[0].log.read_text()


def test_where_no_service_answers_a_running_text_goes_on_as_it_is(folder: Path, long_prompt: list[int]) -> None:
    with ExitStack() as stack:
        first, second = (stack.enter_context(cluster(folder / name, 0)) for name in ("a", "b"))
        group = _group(folder / "group", 1, [first, second], failover_ms=1000)
        stack.callback(group.close)
        client = stack.enter_context(Client(worker=group.worker_address))
        tokens = iter(client.generate(long_prompt[:100], max_new_tokens=LONGER, ignore_eos=True, policy=RECALL))
        said = [next(tokens).token]
        _kill(first)
        _kill(second)
        _wait_for_log(group, "cache service does not answer")
        silent_since = time.monotonic()
        said += [token.token for token in tokens]
        assert len(said) == LONGER
        assert time.monotonic() - silent_since > 2, "longer than the fail-over waits"
        assert "ends its formation" not in group.workers[0].log.read_text()
        assert "the group goes on" not in group.workers[0].log.read_text()


def test_a_suspended_conversation_goes_on_with_its_group_from_its_copy(
    site: Site,  # noqa: F811
    long_prompt: list[int],
) -> None:
    flags = {
        "etcd_endpoints": site.etcd.address,
        "etcd_lease_ms": LEASE_MS,
        "etcd_takeover_ms": LEASE_MS,
        "redis_address": site.redis.address,
    }
    question = long_prompt[400:410]
    with ExitStack() as stack:
        first, second = (stack.enter_context(cluster(site.folder / name, 0, cache=flags)) for name in ("a", "b"))
        group = _group(site.folder / "group", 3, [first, second])
        stack.callback(group.close)
        undisturbed = Conversation(group, long_prompt[:80], RECALL)
        undisturbed.say(30)
        answer = undisturbed.say(20, question)
        talk = Conversation(group, long_prompt[:80], RECALL)
        talk.say(30)
        with Client(worker=group.worker_address, cache=first.cache_address) as client:
            client.suspend(talk.sequence)
        _wait_until_told(site, first)
        _kill(first)
        text = list(talk.text)

        def second_turn() -> list[int]:
            talk.text = list(text)
            return talk.say(20, question)

        # Through the same group: until it is where the copy can be had.
        assert until_available(second_turn) == answer
        assert "computed a" not in group.workers[0].log.read_text()
