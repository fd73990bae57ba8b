"""The Python client against servers that answer as the API says."""

from __future__ import annotations

import numpy as np
import pytest
from client_fakes import HEAD_DIM, PIECES, FakeServers, kv_row, logits_of
from heavywater import Client, HeavywaterError, PolicyOptions
from heavywater.retry import BACKOFFS_S
from heavywater.sets import SequenceSet, expand_ranges, whole_sets
from heavywater.v1 import sequence_pb2


def test_generate_streams_tokens_and_ends_with_the_summary(client: Client) -> None:
    with client.generate([2, 3, 4], max_new_tokens=4) as generation:
        with pytest.raises(RuntimeError, match="last message"):
            _ = generation.summary
        tokens = list(generation)
    assert [token.token for token in tokens] == [3, 4, 5, 6]
    assert [token.index for token in tokens] == [0, 1, 2, 3]
    assert "".join(token.text for token in tokens) == "".join(PIECES[3:7])
    assert generation.sequence_id == 42
    assert generation.summary.finish_reason == "length"


def test_generate_sends_what_it_was_given(client: Client, servers: FakeServers) -> None:
    policy = PolicyOptions(policy="h2o", heavy_tokens=5, recent_tokens=3)
    generation = client.generate(
        "abc",
        max_new_tokens=1,
        policy=policy,
        temperature=0.5,
        top_p=0.75,
        top_k=7,
        seed=9,
        ignore_eos=True,
        tenant="t",
    )
    generation.text()
    (request,) = servers.worker.requests
    assert request.text == "abc"
    assert not request.tokens
    assert request.policy == policy
    assert (request.sampling.temperature, request.sampling.seed) == (0.5, 9)
    assert (request.sampling.top_p, request.sampling.top_k) == (0.75, 7)
    assert request.ignore_eos
    assert request.tenant == "t"


def test_a_conversation_is_sent_as_messages(client: Client, servers: FakeServers) -> None:
    client.generate([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], max_new_tokens=1).text()
    (request,) = servers.worker.requests
    assert [(message.role, message.content) for message in request.messages] == [("system", "s"), ("user", "u")]
    assert not request.text
    assert not request.tokens
    with pytest.raises(ValueError, match="want role and content"):
        client.generate([{"role": "user"}], max_new_tokens=1)


def test_a_worker_says_whether_it_takes_requests(client: Client, servers: FakeServers) -> None:
    assert client.is_ready()
    servers.health.ready = False
    assert not client.is_ready()


def test_logits_arrive_as_an_array_of_the_vocabulary(client: Client) -> None:
    (token,) = client.generate([2, 3], forced_tokens=[7], return_logits=True, policy=PolicyOptions(policy="full"))
    assert token.token == 7
    np.testing.assert_array_equal(token.logits, logits_of("full", 2))


def test_logits_are_none_when_not_asked_for(client: Client) -> None:
    (token,) = client.generate([2, 3], max_new_tokens=1)
    assert token.logits is None


def test_reads_arrive_by_position_when_asked_for(client: Client) -> None:
    first, second = client.generate([2, 3, 4], max_new_tokens=2, return_reads=True)
    assert (first.reads, second.reads) == ((), ((2, 2), (0, 1)))
    assert [token.reads for token in client.generate([2, 3, 4], max_new_tokens=2)] == [(), ()]


def test_leaving_a_generation_early_cancels_the_call(client: Client, servers: FakeServers) -> None:
    with client.generate([2], max_new_tokens=10_000_000) as generation:
        next(iter(generation))
    assert servers.worker.cancelled.wait(timeout=5)


def test_a_generation_that_breaks_off_goes_on_with_each_token_once(
    client: Client, servers: FakeServers, sleeps: list[float]
) -> None:
    servers.worker.breaks = [2, 2, 3]
    tokens = list(client.generate([2, 3, 4], max_new_tokens=4, seed=5))
    assert [token.index for token in tokens] == [0, 1, 2, 3]
    assert [token.token for token in tokens] == [3, 4, 5, 6]
    resumes = [
        (r.resume.sequence_id, r.resume.from_token, list(r.resume.received_tokens)) for r in servers.worker.requests
    ]
    assert resumes == [(0, 0, []), (42, 2, [3, 4]), (42, 2, [3, 4]), (42, 3, [3, 4, 5])]
    assert {(tuple(r.tokens), r.sampling.seed) for r in servers.worker.requests} == {((2, 3, 4), 5)}
    # Longer from try to try, and short again after a token.
    assert sleeps == [0.1, 0.2, 0.1]


def test_a_generation_that_was_never_accepted_is_not_repeated(client: Client, servers: FakeServers) -> None:
    servers.worker.down = True
    with pytest.raises(HeavywaterError, match="not complete"):
        client.generate([2], max_new_tokens=1).text()
    assert len(servers.worker.requests) == 1


def test_a_generation_does_not_go_on_where_its_caller_wants_none(client: Client, servers: FakeServers) -> None:
    servers.worker.breaks = [1]
    with pytest.raises(HeavywaterError, match="group failed"):
        client.generate([2], max_new_tokens=3, resume_timeout_s=0).text()
    assert len(servers.worker.requests) == 1


def test_a_refused_call_raises_the_servers_code_and_words(client: Client) -> None:
    with pytest.raises(HeavywaterError, match="want one") as caught:
        client.generate("", max_new_tokens=1).text()
    assert caught.value.code == "INVALID_ARGUMENT"


def test_reads_are_repeated_while_the_server_is_unavailable(
    client: Client, servers: FakeServers, sleeps: list[float]
) -> None:
    servers.cache.unavailable = 2
    assert client.get(5).sequence_id == 5
    assert sleeps == list(BACKOFFS_S[:2])


def test_a_read_gives_up_after_its_backoffs(client: Client, servers: FakeServers) -> None:
    servers.cache.unavailable = 100
    with pytest.raises(HeavywaterError, match="draining"):
        client.get(5)
    assert servers.cache.calls == len(BACKOFFS_S) + 1


def test_mutations_are_never_repeated(client: Client, servers: FakeServers, sleeps: list[float]) -> None:
    servers.cache.unavailable = 100
    for mutate in (lambda: client.close(1), lambda: client.open(sequence_pb2.OpenSequenceRequest())):
        with pytest.raises(HeavywaterError):
            mutate()
    assert servers.cache.calls == 2
    assert sleeps == []


def test_a_turn_names_its_sequence_and_brings_the_whole_text(client: Client, servers: FakeServers) -> None:
    client.generate([1, 2, 3], max_new_tokens=1, continues=42).text()
    (request,) = servers.worker.requests
    assert request.continue_sequence_id == 42
    assert list(request.tokens) == [1, 2, 3]
    assert not request.HasField("policy"), "it keeps its own"


def test_suspend_and_resume_name_the_sequence_and_the_time(client: Client, servers: FakeServers) -> None:
    assert client.suspend(7, ttl_s=1.5).ttl_ms == 1500
    assert client.suspend(8).tokens_seen == 20
    assert servers.cache.suspended == {7: 1500, 8: 0}
    client.resume(7)
    assert servers.cache.suspended == {8: 0}


def test_fork_names_the_sequence_and_brings_a_request_id(client: Client, servers: FakeServers) -> None:
    forked = client.fork(7, lease_s=2.5)
    assert (forked.sequence_id, forked.shared_tokens) == (8, 512)
    client.fork(7, request_id="mine")
    first, second = servers.cache.forks
    assert (first.sequence_id, first.lease_ms, len(first.request_id)) == (7, 2500, 32)
    assert (second.lease_ms, second.request_id) == (0, "mine")


def test_generate_says_whether_stored_prefixes_may_be_used(client: Client, servers: FakeServers) -> None:
    for reuse in [None, True, False]:
        client.generate("x", max_new_tokens=1, prefix_reuse=reuse).text()
    asked = servers.worker.requests[-3:]
    assert [one.HasField("prefix_reuse") for one in asked] == [False, True, True]
    assert [one.prefix_reuse for one in asked] == [False, True, False]


def test_truncate_names_the_sequence_and_the_tokens_that_stay(client: Client, servers: FakeServers) -> None:
    assert client.truncate(7, 40).tokens_seen == 39
    assert servers.cache.truncated == {7: 40}


def test_open_adds_a_request_id_only_when_there_is_none(client: Client, servers: FakeServers) -> None:
    client.open(sequence_pb2.OpenSequenceRequest(request_id="mine"))
    client.open(sequence_pb2.OpenSequenceRequest())
    assert servers.cache.opened[0] == "mine"
    assert len(servers.cache.opened[1]) == 32


def test_a_stream_that_broke_off_is_read_again_from_its_start(client: Client, servers: FakeServers) -> None:
    servers.cache.unavailable = 1
    assert [one.layer for one in client.get_sets(1)] == [0, 1]


def test_get_reads_all_pages_of_the_tokens(client: Client) -> None:
    assert list(client.get(1).tokens) == list(range(2, 22))


def test_a_set_in_several_messages_is_one() -> None:
    first = sequence_pb2.SequenceSet(layer=1, kv_head=-1, sinks=[0], heavy=[3], scores=[0.5, 1.5])
    rest = sequence_pb2.SequenceSet(layer=1, kv_head=-1, heavy=[4], recent=[9], scores=[2.5, 3.5], continued=True)
    other = sequence_pb2.SequenceSet(layer=2, kv_head=-1)
    one, two = (SequenceSet.from_proto(message) for message in whole_sets([first, rest, other]))
    assert one.resident.tolist() == [0, 3, 4, 9]
    assert one.scores.tolist() == [0.5, 1.5, 2.5, 3.5]
    assert two.layer == 2
    with pytest.raises(HeavywaterError, match="layer 1"):
        whole_sets([other, sequence_pb2.SequenceSet(layer=1, kv_head=-1, continued=True)])


def test_get_sets_are_disjoint_and_hold_all_positions(client: Client) -> None:
    for one in client.get_sets(1, layers=[1]):
        assert one.layer == 1
        together = np.concatenate([one.resident, one.demoted, one.dropped])
        assert sorted(together) == list(range(one.tokens_seen))
        assert len(one.scores) == len(one.resident)


def test_list_follows_the_pages(client: Client) -> None:
    assert [sequence.sequence_id for sequence in client.list()] == [0, 1, 2, 3, 4]


def test_read_returns_keys_and_values_of_each_position(client: Client) -> None:
    keys, values = client.read(client.get(1), layer=0, kv_head=0, first_position=3, num_positions=2)
    assert keys.shape == values.shape == (2, HEAD_DIM)
    np.testing.assert_array_equal(keys[1], kv_row(4)[0])
    np.testing.assert_array_equal(values[0], kv_row(3)[1])


def test_read_is_data_loss_when_a_checksum_does_not_match(client: Client, servers: FakeServers) -> None:
    servers.cache.corrupt = True
    with pytest.raises(HeavywaterError) as caught:
        client.read(client.get(1), layer=0, kv_head=0, first_position=0, num_positions=1)
    assert caught.value.code == "DATA_LOSS"


def test_a_call_without_its_address_names_it() -> None:
    with Client(worker="127.0.0.1:1") as client, pytest.raises(ValueError, match="cache"):
        client.get(1)


def test_a_server_that_is_not_there_is_unavailable() -> None:
    with Client(worker="127.0.0.1:1", sleep=lambda _: None) as client, pytest.raises(HeavywaterError) as caught:
        client.get_model()
    assert caught.value.code == "UNAVAILABLE"


def test_ranges_expand_to_positions() -> None:
    assert expand_ranges([2, 4, 7, 8]).tolist() == [2, 3, 7]
    assert expand_ranges([]).tolist() == []
    with pytest.raises(ValueError, match="3 bounds"):
        expand_ranges([1, 2, 3])


def test_a_suffix_is_sent_as_it_is_given(client: Client, servers: FakeServers) -> None:
    assert client.generate("abc", suffix="de", max_new_tokens=1).text() == PIECES[5]
    generation = client.generate([2, 3], suffix=[4], max_new_tokens=1)
    assert [token.counts.tokens_seen for token in generation] == [3]
    assert generation.summary.suffix_tokens == 1
    text, ids = servers.worker.requests
    assert (text.suffix_text, list(text.suffix_tokens)) == ("de", [])
    assert (ids.suffix_text, list(ids.suffix_tokens)) == ("", [4])


def test_a_request_that_is_accepted_is_named_before_its_tokens_are_read(client: Client) -> None:
    with client.generate("abc", max_new_tokens=3) as generation:
        assert generation.wait_accepted() == generation.sequence_id == 42
        assert [token.index for token in generation] == [0, 1, 2]


def test_waiting_for_acceptance_says_why_there_is_none(client: Client, servers: FakeServers) -> None:
    servers.worker.down = True
    with pytest.raises(HeavywaterError, match="not complete"):
        client.generate("abc", max_new_tokens=3).wait_accepted()
