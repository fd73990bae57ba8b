"""Clients of a load run, and the check that nothing is left, against servers of the test's own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from client_fakes import PIECES, FakeServers
from heavywater import Client, PolicyOptions
from heavywater.load.clients import LoadClients
from heavywater.load.figures import CANCELLED, COMPLETED, FAILED, REFUSED, Outcome
from heavywater.load.leaks import Holdings, MemoryWatch, settled
from heavywater.load.metrics import gauges
from heavywater.load.requests import LoadPlan, LoadRequest, make_requests
from heavywater.load.run import words


def run(servers: FakeServers, requests: list[LoadRequest], clients: int = 4) -> list[Outcome]:
    def connect() -> Client:
        return Client(worker=servers.address, cache=servers.address)

    return LoadClients(connect, clients, [3, 4, 5], PolicyOptions(policy="full")).run(requests)


def requests(count: int, **changes: object) -> list[LoadRequest]:
    plan = {"prompt_tokens": (2, 6), "new_tokens": (3, 5), **changes}
    return make_requests(LoadPlan(count, **plan))  # type: ignore[arg-type]


def test_every_request_is_asked_once_read_to_its_end_and_closed(servers: FakeServers) -> None:
    asked = requests(30)
    outcomes = run(servers, asked)
    assert [o.kind for o in outcomes] == [COMPLETED] * 30
    assert sorted(len(o.token_times_s) for o in outcomes) == sorted(r.new_tokens for r in asked)
    prompts = sorted(list(r.tokens) for r in servers.worker.requests)
    assert prompts == sorted(r.prompt([3, 4, 5]) for r in asked)
    assert len(servers.cache.closed) == 30


def test_a_client_that_leaves_reads_as_far_as_planned_and_closes(servers: FakeServers) -> None:
    asked = requests(20, cancel_share=1.0)
    outcomes = run(servers, asked)
    assert [o.kind for o in outcomes] == [CANCELLED] * 20
    assert sorted(len(o.token_times_s) for o in outcomes) == sorted(r.cancel_after or 0 for r in asked)
    assert 0 in {r.cancel_after for r in asked}
    assert len(servers.cache.closed) == 20
    assert servers.worker.cancelled.wait(5)


def test_a_full_server_is_no_error_and_a_broken_one_is(servers: FakeServers) -> None:
    servers.worker.down = True
    assert {(o.kind, o.code) for o in run(servers, requests(3))} == {(REFUSED, "UNAVAILABLE")}
    servers.worker.down = False
    servers.worker.answer = lambda request: "?"  # not in its vocabulary: it raises
    assert {(o.kind, o.code) for o in run(servers, requests(3))} == {(FAILED, "UNKNOWN")}


def test_a_stream_that_breaks_off_is_seen_and_its_sequence_closed(servers: FakeServers) -> None:
    servers.worker.breaks = [2]
    outcomes = run(servers, requests(3), clients=1)
    assert [o.kind for o in outcomes] == [REFUSED, COMPLETED, COMPLETED]
    assert len(outcomes[0].token_times_s) == 2
    assert len(servers.cache.closed) == 3


@pytest.mark.parametrize(
    ("indices", "said"), [([0, 1], "2 tokens came, want 3"), ([0, 2, 3], "token 2 came as number 2")]
)
def test_tokens_that_are_missing_or_out_of_order_are_an_error(indices: list[int], said: str) -> None:
    class Stream:
        sequence_id = 0  # nothing to close

        def __enter__(self) -> Stream:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def __iter__(self) -> Iterator[SimpleNamespace]:
            return iter([SimpleNamespace(index=index) for index in indices])

    client = SimpleNamespace(generate=lambda prompt, **options: Stream(), disconnect=lambda: None)
    clients = LoadClients(lambda: client, 1, [3], PolicyOptions())  # type: ignore[arg-type,return-value]
    (outcome,) = clients.run([LoadRequest(0, 0.0, 2, 3, None, "0")])
    assert (outcome.kind, outcome.code, outcome.message) == (FAILED, "DATA_LOSS", said)


def test_a_sequence_that_cannot_be_closed_is_an_error_unless_one_is_known(servers: FakeServers) -> None:
    servers.cache.unavailable = 1
    (outcome,) = run(servers, requests(1))
    assert (outcome.kind, outcome.code, outcome.message) == (REFUSED, "UNAVAILABLE", "Close: draining")


def test_no_more_than_the_clients_are_under_way(servers: FakeServers) -> None:
    at_once: list[int] = []
    running: list[int] = []

    def answer(request: object) -> str:
        running.append(1)
        at_once.append(len(running))
        time.sleep(0.02)
        running.pop()
        return "abcdefgh" * 2

    servers.worker.answer = answer
    run(servers, [LoadRequest(i, 0.0, 2, 1, None, str(i)) for i in range(12)], clients=3)
    assert max(at_once) == 3


def test_waiting_for_a_free_client_counts_in_an_open_loop(servers: FakeServers) -> None:
    def answer(request: object) -> str:
        time.sleep(0.2)
        return "abcdefgh"

    servers.worker.answer = answer
    both_at_once = [LoadRequest(i, 0.05, 2, 1, None, str(i)) for i in range(2)]
    first, second = run(servers, both_at_once, clients=1)
    assert first.late_s < 0.15 <= second.late_s
    assert second.asked_s == first.asked_s
    assert second.token_times_s[0] - second.asked_s >= 0.4


def test_an_arrival_is_waited_for(servers: FakeServers) -> None:
    started_s = time.monotonic()
    (outcome,) = run(servers, [LoadRequest(0, 0.2, 2, 1, None, "0")])
    assert outcome.token_times_s[0] - started_s >= 0.2
    assert 0 <= outcome.late_s < 0.2


@pytest.mark.parametrize("clients", [0, 1025])
def test_clients_are_bounded(servers: FakeServers, clients: int) -> None:
    with pytest.raises(ValueError, match=f"clients is {clients}, want 1 to 1024"):
        run(servers, requests(1), clients)


def test_prompts_are_words() -> None:
    assert words(["<|im_end|>", "a", "Ġwater", "heavy"]) == [2, 3]
    with pytest.raises(ValueError, match="is a word"):
        words(list(PIECES[:2]))


def test_what_there_is_more_of_is_named() -> None:
    before = Holdings({"pages": 2, "slots": 0}, {"workspace": 0})
    assert Holdings({"pages": 2, "slots": 0}, {"workspace": 9}).more_than(before) == []
    assert Holdings({"pages": 1, "slots": 4, "queued": 1}).more_than(before) == ["slots", "queued"]


def test_what_is_only_late_is_waited_for_and_what_stays_is_not() -> None:
    left = [3, 2, 0, 7]
    assert settled(Holdings({"pages": 0}), lambda: Holdings({"pages": left.pop(0)}), 10.0).counts == {"pages": 0}
    assert left == [7]
    assert settled(Holdings({"pages": 0}), lambda: Holdings({"pages": 7}), 0.3).counts == {"pages": 7}


def test_memory_is_judged_from_the_first_quarter_on() -> None:
    sizes = {1: iter([10, 90, 95, 95, 99]), 2: iter([10, 20, 30, 40, 50])}
    processes = [SimpleNamespace(name="cache", pid=1), SimpleNamespace(name="worker", pid=2)]
    watch = MemoryWatch(processes, 8, lambda pid: next(sizes[pid]))  # type: ignore[arg-type]
    for _ in range(8):
        watch.note_end()
    watch.finish()
    assert watch.by_process() == {"cache 0": [10, 90, 95, 95, 99], "worker 1": [10, 20, 30, 40, 50]}
    assert watch.grown(slack_bytes=29) == ["worker 1"]
    assert watch.grown(slack_bytes=30) == []


def test_gauges_are_read_by_label() -> None:
    text = (
        "# TYPE heavywater_sequences gauge\n"
        'heavywater_sequences{state="queued"} 2\n'
        'heavywater_sequences{rank="0",state="running"} 1e+03\n'
        'heavywater_sequences_restored_total{state="queued"} 9\n'
        "heavywater_device_limit_bytes 5\n"
    )
    assert gauges(text, "heavywater_sequences", "state") == {"queued": 2.0, "running": 1000.0}
    assert gauges(text, "heavywater_device_limit_bytes", "kind") == {"": 5.0}
