"""A sequence becomes two, and both go on: answers, sets and bytes as if each had been alone."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from cluster import Cluster, cluster, takes_long
from heavywater import Client, HeavywaterError
from test_prefix_reuse import Asked, _expect_empty, _host, wait_finished
from test_turns import BOUNDED, FULL, RECALL, Conversation

PAGE = 32
WORKER = {"page_tokens": PAGE, "snapshot_interval_tokens": 24, "reserve_ahead_tokens": 0}
FIRST = 60


def _copy(talk: Conversation, sequence: int) -> Conversation:
    """The same text, as another sequence."""
    copy = Conversation(talk.group, talk.text, talk.policy)
    copy.sequence = sequence
    return copy


def _wait_until_it_is_heard_of(group: Cluster, prompt: list[int]) -> None:
    """The ranks find out a moment after it that the cache service is back."""
    deadline = time.monotonic() + 30
    while True:
        try:
            probe = Asked(group, prompt[:8], FULL, max_new_tokens=1)
            break
        except HeavywaterError as error:
            assert error.code == "UNAVAILABLE"
            assert time.monotonic() < deadline
            time.sleep(0.2)
    with Client(cache=group.cache_address) as client:
        client.close(probe.sequence)


@pytest.mark.parametrize(
    ("ranks", "policy"),
    [pytest.param(3, BOUNDED, marks=takes_long), (3, RECALL), (1, FULL)],
    ids=["bounded", "recall", "full"],
)
def test_both_go_on_as_one_that_was_never_forked(
    folder: Path, long_prompt: list[int], ranks: int, policy: object
) -> None:
    questions = [long_prompt[400:425], long_prompt[600:630]]
    with cluster(
        folder, ranks, cache={"state_dir": folder / "state", "sequence_lease_ms": 25000}, worker=WORKER
    ) as group:
        alone = [Conversation(group, long_prompt[:150], policy) for _ in questions]  # type: ignore[arg-type]
        for talk in alone:
            talk.say(FIRST)
        parent = Conversation(group, long_prompt[:150], policy)  # type: ignore[arg-type]
        parent.say(FIRST)
        parent.wait_finished()
        before = _host(group).used_bytes
        with Client(worker=group.worker_address, cache=group.cache_address) as client:
            forked = client.fork(parent.sequence, request_id="fork")
            assert client.fork(parent.sequence, request_id="fork") == forked
            # The parent has seen 209 tokens: six pages and a part of the seventh.
            assert forked.shared_tokens == 192
            assert 0 < forked.tokens_seen <= 209
            # One page of each layer and head, and its watermarks.
            assert 0 < _host(group).used_bytes - before < before / 3 / 6
            child = _copy(parent, forked.sequence_id)
            # A child that is forked itself, over a restart of the cache service.
            second = client.fork(child.sequence)
            grandchild = _copy(child, second.sequence_id)
        assert group.cache is not None
        group.cache.kill()
        group.restart_cache()
        _wait_until_it_is_heard_of(group, long_prompt)
        answers = [talk.say(40, question) for talk, question in zip(alone, questions, strict=True)]
        assert parent.say(40, questions[0]) == answers[0]
        assert child.say(40, questions[1]) == answers[1]
        assert parent.sets() == alone[0].sets()
        assert child.sets() == alone[1].sets()
        # The parent's end leaves the others' pages; another way on from the same place.
        with Client(cache=group.cache_address) as client:
            client.close(parent.sequence)
            client.close(child.sequence)
        assert grandchild.say(40, questions[0]) == answers[0]
        _expect_empty(group, [grandchild.sequence, *(talk.sequence for talk in alone)])


def test_a_child_that_goes_back_writes_pages_of_its_own(folder: Path, long_prompt: list[int]) -> None:
    with cluster(folder, 3, worker=WORKER) as group, Client(cache=group.cache_address) as client:
        parent = Conversation(group, long_prompt[:150], RECALL)
        first = parent.say(FIRST)
        parent.wait_finished()
        # In the middle of a page that both hold.
        child = _copy(parent, client.fork(parent.sequence).sequence_id)
        client.truncate(child.sequence, 170)
        child.text = child.text[:170]
        other = child.say(FIRST, long_prompt[700:720])
        assert other != first
        undisturbed = Conversation(group, long_prompt[:150], RECALL)
        assert undisturbed.say(FIRST) == first
        question = long_prompt[400:425]
        assert parent.say(40, question) == undisturbed.say(40, question)
        assert parent.sets() == undisturbed.sets()
        _expect_empty(group, [parent.sequence, child.sequence, undisturbed.sequence])


def test_what_cannot_be_forked_is_refused_by_name(folder: Path, long_prompt: list[int]) -> None:
    with (
        cluster(folder, 1, worker=WORKER) as group,
        Client(worker=group.worker_address, cache=group.cache_address) as client,
    ):
        with pytest.raises(HeavywaterError, match="unknown or has ended") as unknown:
            client.fork(99)
        assert unknown.value.code == "NOT_FOUND"
        running = client.generate(long_prompt[:200], max_new_tokens=400, ignore_eos=True, policy=BOUNDED)
        next(iter(running))
        with pytest.raises(HeavywaterError, match="runs, want one that has ended") as runs:
            client.fork(running.sequence_id)
        assert runs.value.code == "FAILED_PRECONDITION"
        running.cancel()
        ended = Asked(group, long_prompt[:100], BOUNDED)
        wait_finished(group, ended)
        client.fork(ended.sequence, request_id="one", lease_s=30)
        with pytest.raises(HeavywaterError, match="with lease_ms 30000, not 0"):
            client.fork(ended.sequence, request_id="one")
