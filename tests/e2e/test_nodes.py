"""A group over two nodes, as namespaces (nodes.py): processes, links and nodes are lost in the middle of
a text, and the client gets the text of the undisturbed run on one node, each token exactly once.

The cache service and ranks 0 and 1 are on node a; rank 2 is on node b, where it cannot map the slab and
streams its pages. tests/README.md says which cases from the field (CASES A10 to A20) are shown where.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from cluster import Cluster, cluster, takes_long
from heavywater import Client, HeavywaterError
from heavywater.v1 import common_pb2
from nodes import Network, Node, network

PROMPT = 120
TOKENS = 60
LAYERS = (0, 29)
HEADS = 3
CUT_S = 3.0
NOTICED_S = 5.0
# Until the end of a call learns that the other end's machine has vanished, and slack.
VANISHED_S = 15.0 + 3.0
ABANDONED_S = 40.0 + 10.0
BOUNDED = common_pb2.PolicyOptions(policy="snapkv_h2o", heavy_tokens=48, recent_tokens=16)
RECALL = common_pb2.PolicyOptions(policy="recall", heavy_tokens=48, recent_tokens=16)
REQUESTS: dict[str, dict[str, object]] = {
    "bounded": {"policy": BOUNDED},
    "recall": {"policy": RECALL},
    "sampled": {"policy": BOUNDED, "temperature": 0.8, "seed": 7},
}
# Committed states come often, so that short texts have several.
WORKER = {"snapshot_interval_tokens": 12}
LEASE_MS = 6_000
Events = dict[int, Callable[[], object]]


@dataclass(frozen=True)
class Run:
    """What a text and its sequence were like."""

    tokens: list[int]
    counts: common_pb2.SequenceCounts
    positions: list[tuple[list[int], ...]]  # of each set: resident, demoted, dropped
    rows: list[bytes]  # K and V of some layers


@dataclass
class Site:
    """A group over two nodes."""

    network: Network
    a: Node
    b: Node  # or what has taken its place
    group: Cluster

    def client(self) -> Client:
        return Client(worker=self.group.worker_address, cache=self.group.cache_address)

    def log(self, rank: int) -> str:
        return self.group.workers[rank].log.read_text()


@contextmanager
def _site(folder: Path, on_b: tuple[int, ...]) -> Iterator[Site]:
    """Ranks `on_b` are on node b; the others and the cache service on node a."""
    cache = {"state_dir": folder / "state", "sequence_lease_ms": LEASE_MS}
    with network() as net:
        a, b = net.add("a"), net.add("b")
        hosts = [b.host if rank in on_b else a.host for rank in range(3)]
        with cluster(folder, 3, cache=cache, worker=WORKER, hosts=hosts, cache_host=a.host) as group:
            yield Site(net, a, b, group)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with _site(tmp_path_factory.mktemp("nodes"), on_b=(2,)) as made:
        yield made
        _expect_empty(made)


@pytest.fixture(scope="module")
def prompt(long_prompt: list[int]) -> list[int]:
    return long_prompt[:PROMPT]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, prompt: list[int]) -> dict[str, Run]:
    """On one node, where nothing happens."""
    with (
        cluster(tmp_path_factory.mktemp("one-node"), 3, worker=WORKER) as group,
        Client(worker=group.worker_address, cache=group.cache_address) as client,
    ):
        return {name: _run(client, prompt, name, {}) for name in REQUESTS}


def _run(client: Client, prompt: list[int], name: str, events: Events) -> Run:
    """A text; an event happens once so many tokens have come."""
    tokens: list[int] = []
    fields: dict[str, object] = {"max_new_tokens": TOKENS, "ignore_eos": True, **REQUESTS[name]}
    with client.generate(prompt, **fields) as generation:  # type: ignore[arg-type]
        for token in generation:
            assert token.index == len(tokens), "a token came twice, or not at all"
            tokens.append(token.token)
            events.get(len(tokens), lambda: None)()
    counts = generation.summary.counts
    plan = generation.summary.plan
    return Run(
        tokens,
        counts,
        _positions(client, generation.sequence_id, plan, counts.tokens_seen),
        _rows(client, generation.sequence_id, counts.tokens_seen),
    )


def _positions(client: Client, sequence: int, plan: int, seen: int) -> list[tuple[list[int], ...]]:
    """Of each set, once the last plan is reported: every position is in one part of it."""
    deadline = time.monotonic() + 30
    sets = client.get_sets(sequence)
    while not sets or any(one.plan != plan for one in sets):
        assert time.monotonic() < deadline, f"plan {plan} is not reported"
        time.sleep(0.1)
        sets = client.get_sets(sequence)
    for one in sets:
        parts = np.concatenate([one.resident, one.demoted, one.dropped])
        assert np.array_equal(np.sort(parts), np.arange(seen)), f"layer {one.layer} is not whole"
    return [tuple(sorted(part.tolist()) for part in (one.resident, one.demoted, one.dropped)) for one in sets]


def _rows(client: Client, sequence: int, seen: int) -> list[bytes]:
    """Bytes of K and V, once all have been written: pages are streamed behind the step."""
    opened = client.get(sequence)
    where = [(layer, head) for layer in LAYERS for head in range(HEADS)]
    both = [client.read(opened, layer, head, 0, seen) for layer, head in where]
    return [k.tobytes() + v.tobytes() for k, v in both]


def _expect_empty(site: Site) -> None:
    """Once all sequences are closed nothing is held, and tiers add up throughout."""
    with site.client() as client:
        for sequence in list(client.list()):
            client.close(sequence.sequence_id)
        deadline = time.monotonic() + LEASE_MS / 1000 + 30
        while True:
            stats = client.stats()
            for tier in stats.tiers:
                assert tier.free_bytes + tier.used_bytes == tier.total_bytes
            if not stats.sequences and not any(tier.used_bytes or tier.pages for tier in stats.tiers):
                return
            assert time.monotonic() < deadline, stats
            time.sleep(0.2)


def _expect_undisturbed(
    site: Site, prompt: list[int], name: str, events: Events, undisturbed: dict[str, Run], empty: bool = True
) -> None:
    with site.client() as client:
        got = _run(client, prompt, name, events)
    wanted = undisturbed[name]
    assert got.tokens == wanted.tokens
    assert got.counts == wanted.counts
    assert got.positions == wanted.positions
    assert got.rows == wanted.rows
    for address in site.group.worker_addresses:
        site.group.wait_ready(address)
    if empty:
        _expect_empty(site)


def _later(delay_s: float, act: Callable[[], object]) -> None:
    threading.Timer(delay_s, act).start()


@pytest.mark.parametrize("name", REQUESTS)
def test_a_text_over_two_nodes_is_that_of_one(
    site: Site, prompt: list[int], undisturbed: dict[str, Run], name: str
) -> None:
    assert 'pages="in the slab"' in site.log(0)
    assert 'pages="streamed"' in site.log(2)
    assert 'pages="in the slab"' not in site.log(2)
    with site.client() as client:
        got = _run(client, prompt, name, {})
    assert got == undisturbed[name]
    _expect_empty(site)


def test_the_cache_service_dies_and_comes_back(site: Site, prompt: list[int], undisturbed: dict[str, Run]) -> None:
    assert site.group.cache is not None
    events: Events = {10: site.group.cache.kill, 30: site.group.restart_cache}
    _expect_undisturbed(site, prompt, "recall", events, undisturbed)


@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_dies_on_either_node(site: Site, prompt: list[int], undisturbed: dict[str, Run], rank: int) -> None:
    def die() -> None:
        site.group.workers[rank].kill()
        _later(0.5, lambda: site.group.restart_worker(rank))

    _expect_undisturbed(site, prompt, "bounded", {20: die}, undisturbed, empty=False)
    # What node b has streamed is not read back; nobody restores a part without it.
    assert "computed again" in site.log(0)


@pytest.mark.parametrize("form", ["packets-vanish", "interface-down", pytest.param("hears-nothing", marks=takes_long)])
def test_the_link_is_cut_in_the_middle_of_decoding(
    site: Site, prompt: list[int], undisturbed: dict[str, Run], form: str
) -> None:
    cut, join = {
        "packets-vanish": (site.b.unplug, site.b.plug_in),
        "interface-down": (site.b.take_down, site.b.bring_up),
        "hears-nothing": (site.b.go_deaf, site.b.hear_again),
    }[form]
    if form == "hears-nothing" and not shutil.which("iptables"):
        pytest.skip("iptables is not installed")
    back: list[float] = []

    def cut_for_a_while() -> None:
        cut()
        _later(CUT_S, lambda: (join(), back.append(time.monotonic())))

    ended: list[float] = []
    # The last token: the client may be some tokens behind.
    events: Events = {10: cut_for_a_while, TOKENS: lambda: ended.append(time.monotonic())}
    _expect_undisturbed(site, prompt, "recall", events, undisturbed)
    assert ended[0] > back[0], "the text went on without node b: it was not cut"


@takes_long
def test_a_cut_that_is_shorter_than_the_time_peers_get_ends_no_group(
    site: Site, prompt: list[int], undisturbed: dict[str, Run]
) -> None:
    failures = [site.log(rank).count("it forms again") for rank in range(3)]

    def cut_briefly() -> None:
        site.b.unplug()
        _later(1.5, site.b.plug_in)

    _expect_undisturbed(site, prompt, "recall", {20: cut_briefly}, undisturbed)
    assert [site.log(rank).count("it forms again") for rank in range(3)] == failures


@takes_long
@pytest.mark.parametrize("cut_s", [8, 40])
def test_the_link_is_cut_for_longer_than_leases(
    site: Site, prompt: list[int], undisturbed: dict[str, Run], cut_s: float
) -> None:
    def cut_for_long() -> None:
        site.b.unplug()
        _later(cut_s, site.b.plug_in)

    _expect_undisturbed(site, prompt, "bounded", {20: cut_for_long}, undisturbed)


def test_over_a_slow_link_a_text_is_the_same_and_others_that_are_cancelled_leave_nothing(
    site: Site, prompt: list[int], undisturbed: dict[str, Run]
) -> None:
    site.b.shape(kbit=100_000, delay_ms=2)
    cancelled: list[int] = []

    def cancel_some() -> None:
        with site.client() as client:
            for after in (0, 1, 4, 0):
                fields: dict[str, object] = {"max_new_tokens": TOKENS, "ignore_eos": True, "policy": RECALL}
                with client.generate(prompt, **fields) as generation:  # type: ignore[arg-type]
                    generation.wait_accepted()
                    for token in generation if after else ():
                        if token.index + 1 == after:
                            break
                cancelled.append(after)

    others = threading.Thread(target=cancel_some)
    try:
        _expect_undisturbed(site, prompt, "bounded", {3: others.start}, undisturbed, empty=False)
        others.join()
    finally:
        site.b.unshape()
    assert len(cancelled) == 4
    _expect_empty(site)


@takes_long
def test_a_group_that_has_done_nothing_for_long_goes_on(
    site: Site, prompt: list[int], undisturbed: dict[str, Run]
) -> None:
    time.sleep(90)
    _expect_undisturbed(site, prompt, "bounded", {}, undisturbed)


def test_two_ranks_die_one_while_the_other_is_replaced(
    site: Site, prompt: list[int], undisturbed: dict[str, Run]
) -> None:
    epochs = site.log(2).count("joined the group")

    def replace_both() -> None:
        site.group.restart_worker(2)
        deadline = time.monotonic() + 30
        while site.log(2).count("joined the group") == epochs and time.monotonic() < deadline:
            time.sleep(0.005)
        site.group.workers[1].kill()
        site.group.restart_worker(1)

    def die() -> None:
        site.group.workers[2].kill()
        _later(0.2, replace_both)

    replacing = site.group.workers[2]
    _expect_undisturbed(site, prompt, "sampled", {20: die}, undisturbed, empty=False)
    assert site.group.workers[2] is not replacing
    assert site.group.workers[2].alive(), "the replacement has ended"


def test_a_node_dies_and_a_third_takes_its_rank(site: Site, prompt: list[int], undisturbed: dict[str, Run]) -> None:
    def die() -> None:
        # First the link: no connection is closed on its behalf.
        site.b.unplug()
        site.group.workers[2].kill()
        site.b.close()
        site.b = site.network.add("c")
        threading.Thread(target=replace).start()

    ready: list[bool] = []

    def replace() -> None:
        # A group that is not complete is alive, and not ready (CASES A20).
        deadline = time.monotonic() + NOTICED_S + 5
        while any(site.group.is_ready(rank) for rank in (0, 1)) and time.monotonic() < deadline:
            time.sleep(0.1)
        ready.extend(site.group.is_ready(rank, service) for rank in (0, 1) for service in ("readiness", "liveness", ""))
        site.group.restart_worker(2, site.b.host)

    _expect_undisturbed(site, prompt, "recall", {25: die}, undisturbed, empty=False)
    assert ready == [False, True, True] * 2


@pytest.fixture(scope="module")
def led_from_b(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Rank 0 is on node b: away from the cache service and the other ranks."""
    with _site(tmp_path_factory.mktemp("led-from-b"), on_b=(0,)) as made:
        yield made
        _expect_empty(made)


@takes_long
def test_a_client_whose_servers_machine_has_vanished_is_told(led_from_b: Site, prompt: list[int]) -> None:
    site = led_from_b
    with site.client() as client:
        fields: dict[str, object] = {"max_new_tokens": 4000, "ignore_eos": True, "resume_timeout_s": 0.0}
        generation = iter(client.generate(prompt, **fields))  # type: ignore[arg-type]
        for _ in range(5):
            next(generation)
        site.b.unplug()
        cut = time.monotonic()
        try:
            with pytest.raises(HeavywaterError) as told:
                list(generation)
            assert told.value.code == "UNAVAILABLE"
            assert time.monotonic() - cut < VANISHED_S
        finally:
            site.b.plug_in()
    for address in site.group.worker_addresses:
        site.group.wait_ready(address)


@takes_long
def test_a_client_whose_machine_has_vanished_holds_nothing(site: Site, prompt: list[int]) -> None:
    script = (
        "import sys, heavywater\n"
        "with heavywater.Client(worker=sys.argv[1]) as client:\n"
        "    for token in client.generate([int(i) for i in sys.argv[2:]], max_new_tokens=8000, ignore_eos=True):\n"
        "        print(token.index, flush=True)\n"
    )
    node = site.network.add("user")
    command = [*node.host.prefix, sys.executable, "-c", script, site.group.worker_address, *map(str, prompt)]
    user = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert user.stdout is not None
        while user.stdout.readline() != "5\n":
            assert user.poll() is None
        node.unplug()
        with site.client() as client:
            (sequence,) = client.list()
            deadline = time.monotonic() + ABANDONED_S
            while not client.get(sequence.sequence_id).finished:
                assert time.monotonic() < deadline, "its text is still being computed"
                time.sleep(0.5)
            assert client.get(sequence.sequence_id).num_tokens < 8000
    finally:
        user.kill()
        user.communicate(timeout=10)
    _expect_empty(site)


@pytest.mark.parametrize("cut_s", [CUT_S, pytest.param(20.0, marks=takes_long)])
def test_rank_0_is_cut_off_from_all_but_its_client(
    led_from_b: Site, prompt: list[int], undisturbed: dict[str, Run], cut_s: float
) -> None:
    site = led_from_b

    def isolate(on: bool) -> None:
        for node in (site.a, site.b):
            node.isolate(on)

    def cut() -> None:
        isolate(True)
        _later(cut_s, lambda: isolate(False))

    _expect_undisturbed(site, prompt, "recall", {20: cut}, undisturbed, empty=False)


def test_the_node_of_rank_0_dies_and_another_takes_its_address(
    led_from_b: Site, prompt: list[int], undisturbed: dict[str, Run]
) -> None:
    site = led_from_b

    def die() -> None:
        site.b.unplug()
        site.group.workers[0].kill()
        site.b.close()
        site.b = site.network.add("c", site.b.host.address)
        _later(0.5, lambda: site.group.restart_worker(0, site.b.host))

    _expect_undisturbed(site, prompt, "bounded", {25: die}, undisturbed, empty=False)
