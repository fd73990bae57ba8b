"""Several cache services share an etcd and a Redis: one is lost with its node, its sequences go on elsewhere."""

from __future__ import annotations

import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster import Cluster, cluster, takes_long
from etcd_server import Etcd
from heavywater import Client, HeavywaterError
from heavywater.v1 import common_pb2
from test_tiers import Redis
from test_turns import BOUNDED, OFTEN, RECALL, Conversation

LEASE_MS = 2000
FIRST = 70
SECOND = 40


@dataclass
class Site:
    """What all nodes share."""

    folder: Path
    etcd: Etcd
    redis: Redis

    def node(self, name: str, ranks: int, **cache: object) -> Cluster:
        """A cache service and the ranks of a group, as on a node of their own."""
        flags = {
            "etcd_endpoints": self.etcd.address,
            "etcd_lease_ms": LEASE_MS,
            "etcd_takeover_ms": LEASE_MS,
            "redis_address": self.redis.address,
            **cache,
        }
        return Cluster(self.folder / name, ranks, cache=flags, worker=OFTEN)

    def copies(self) -> int:
        with socket.create_connection(("127.0.0.1", self.redis.port), timeout=5) as connection:
            connection.sendall(b"DBSIZE\r\n")
            return int(connection.recv(64)[1:].strip())

    def wait_for_copies(self, count: int) -> None:
        deadline = time.monotonic() + 40
        while self.copies() != count:
            assert time.monotonic() < deadline, f"{self.copies()} copies, want {count}"
            time.sleep(0.05)


@pytest.fixture
def site(folder: Path) -> Iterator[Site]:
    for program in ("etcd", "redis-server"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    with ExitStack() as stack:
        etcd = Etcd(folder)
        stack.callback(etcd.kill)
        redis = Redis(folder)
        stack.callback(redis.kill)
        yield Site(folder, etcd, redis)


def _lose(node: Cluster) -> None:
    """Every process is killed, and the memory is gone with them."""
    assert node.cache is not None
    slab = re.findall(r'slab="([^"]+)"', node.cache.log.read_text())[-1]
    for process in [*node.workers, node.cache]:
        process.kill()
    memory = Path("/dev/shm") / slab
    assert memory.exists()
    memory.unlink()


def _say_elsewhere(talk: Conversation, node: Cluster, new_tokens: int, more: list[int]) -> list[int]:
    """The turn through another node, asked again while that does not know yet that the first one is lost."""
    talk.group = node
    text = list(talk.text)
    deadline = time.monotonic() + 30
    while True:
        try:
            return talk.say(new_tokens, more)
        except HeavywaterError as error:
            assert error.code == "UNAVAILABLE", error
            assert time.monotonic() < deadline, error
        talk.text = list(text)
        time.sleep(0.2)


@pytest.mark.parametrize(
    ("ranks", "policy", "sampling"),
    [(3, BOUNDED, {}), (1, RECALL, {"temperature": 0.8, "seed": 5})],
    ids=["three-ranks", "recall-sampled"],
)
def test_a_second_turn_of_a_suspended_session_whose_node_is_lost_is_the_same_answer_elsewhere(
    site: Site, long_prompt: list[int], ranks: int, policy: common_pb2.PolicyOptions, sampling: dict[str, float]
) -> None:
    question = long_prompt[400:420]
    with ExitStack() as stack:
        lost, other = (site.node(name, ranks) for name in ("a", "b"))
        stack.callback(lost.close)
        stack.callback(other.close)
        undisturbed = Conversation(other, long_prompt[:120], policy, **sampling)
        talk = Conversation(lost, long_prompt[:120], policy, **sampling)
        assert undisturbed.say(FIRST) == talk.say(FIRST)
        answer = undisturbed.say(SECOND, question)
        with Client(worker=lost.worker_address, cache=lost.cache_address) as client:
            client.suspend(talk.sequence)
        site.wait_for_copies(1)
        _lose(lost)
        assert _say_elsewhere(talk, other, SECOND, question) == answer
        assert talk.resident == undisturbed.resident
        assert talk.sets() == undisturbed.sets()
        # And it goes on there.
        assert talk.say(8, long_prompt[500:503]) == undisturbed.say(8, long_prompt[500:503])
        with Client(worker=other.worker_address, cache=other.cache_address) as client:
            client.close(talk.sequence)
        site.wait_for_copies(0)


@takes_long
def test_turns_go_on_while_etcd_is_away_and_what_was_suspended_meanwhile_outlives_its_node(
    site: Site, long_prompt: list[int]
) -> None:
    questions = [long_prompt[400:410], long_prompt[420:430]]
    with ExitStack() as stack:
        lost, other = (site.node(name, 1) for name in ("a", "b"))
        stack.callback(lost.close)
        stack.callback(other.close)
        undisturbed = Conversation(other, long_prompt[:80], BOUNDED)
        answers = [undisturbed.say(30), *(undisturbed.say(30, question) for question in questions)]
        talk = Conversation(lost, long_prompt[:80], BOUNDED)
        with Client(worker=lost.worker_address, cache=lost.cache_address) as client:
            assert talk.say(30) == answers[0]
            client.suspend(talk.sequence)
            site.wait_for_copies(1)
            site.etcd.pause()
            time.sleep(5 * LEASE_MS / 1000)
            assert talk.say(30, questions[0]) == answers[1]
            client.suspend(talk.sequence)
            site.etcd.resume()
            time.sleep(LEASE_MS / 1000)
            site.etcd.kill()
            time.sleep(2 * LEASE_MS / 1000)
            site.etcd.start()
            # Elsewhere it is known where it is.
            deadline = time.monotonic() + 30
            with Client(worker=other.worker_address, cache=other.cache_address) as elsewhere:
                while True:
                    with pytest.raises(HeavywaterError) as refused:
                        elsewhere.get(talk.sequence)
                    if refused.value.code == "FAILED_PRECONDITION":
                        break
                    assert time.monotonic() < deadline, refused.value
                    time.sleep(0.2)
            assert lost.cache_address in str(refused.value)
            assert client.get(talk.sequence).suspended
        _wait_until_told(site, lost)
        _lose(lost)
        assert _say_elsewhere(talk, other, 30, questions[1]) == answers[2]


def _wait_until_told(site: Site, node: Cluster) -> None:
    """The copy of the last suspension has taken the place of the first one's."""
    time.sleep(2)
    site.wait_for_copies(1)
    assert node.cache is not None and node.cache.alive()


@takes_long
def test_without_a_copy_the_text_is_computed_anew_elsewhere(site: Site, long_prompt: list[int]) -> None:
    with ExitStack() as stack:
        lost, other = (site.node(name, 1, remote_copy="none") for name in ("a", "b"))
        stack.callback(lost.close)
        stack.callback(other.close)
        talk = Conversation(lost, long_prompt[:60], BOUNDED)
        talk.say(20)
        with Client(worker=lost.worker_address, cache=lost.cache_address) as client:
            client.suspend(talk.sequence)
        time.sleep(1)
        _lose(lost)
        deadline = time.monotonic() + 30
        with Client(worker=other.worker_address, cache=other.cache_address) as client:
            while True:
                with pytest.raises(HeavywaterError) as gone:
                    client.get(talk.sequence)
                if gone.value.code != "UNAVAILABLE":
                    break
                assert time.monotonic() < deadline, gone.value
                time.sleep(0.2)
            assert gone.value.code == "DATA_LOSS"
            assert lost.cache_address in str(gone.value)
            text = [*talk.text, *long_prompt[200:204]]
            anew = client.generate(text, max_new_tokens=4, ignore_eos=True, policy=BOUNDED, continues=talk.sequence)
            assert len(list(anew)) == 4
            assert anew.sequence_id != talk.sequence


def test_a_restart_in_order_keeps_suspended_sequences_without_a_state(site: Site, long_prompt: list[int]) -> None:
    """Drained, it copies what is not copied yet; its successor takes its sequences over."""
    question = long_prompt[300:310]
    with cluster(site.folder / "plain", 1, worker=OFTEN) as group:
        undisturbed = Conversation(group, long_prompt[:60], BOUNDED)
        undisturbed.say(20)
        answer = undisturbed.say(20, question)
    node = site.node("a", 1)
    try:
        talk = Conversation(node, long_prompt[:60], BOUNDED)
        talk.say(20)
        with Client(worker=node.worker_address, cache=node.cache_address) as client:
            client.suspend(talk.sequence)
        assert node.cache is not None
        assert node.cache.terminate() == 0
        assert site.copies() == 1
        node.restart_cache()
        assert _say_elsewhere(talk, node, 20, question) == answer
    finally:
        node.close()
