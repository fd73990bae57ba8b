"""A sequence goes on after its generation has ended: further turns, suspended or not, over restarts of everything."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from cluster import Cluster, cluster, takes_long
from heavywater import Client, HeavywaterError
from heavywater.sets import SequenceSet
from heavywater.v1 import admin_pb2, common_pb2, sequence_pb2

BOUNDED = common_pb2.PolicyOptions(policy="snapkv_h2o", heavy_tokens=48, recent_tokens=16)
RECALL = common_pb2.PolicyOptions(policy="recall", heavy_tokens=48, recent_tokens=16)
FULL = common_pb2.PolicyOptions(policy="full")
FIRST = 90
SECOND = 60
# A state is committed now and then; what is behind the last one is taken in again.
OFTEN = {"snapshot_interval_tokens": 24}


class Conversation:
    """The text so far, and the sequence that holds it."""

    def __init__(self, group: Cluster, prompt: list[int], policy: common_pb2.PolicyOptions, **sampling: float) -> None:
        self.group = group
        self.text = list(prompt)
        self.sequence = 0
        self.policy = policy
        self.sampling = sampling
        self.resident: list[float] = []

    def say(self, new_tokens: int, more: list[int] = []) -> list[int]:  # noqa: B006
        """One turn; the tokens of the answer."""
        self.text += more
        first = self.sequence == 0
        with Client(worker=self.group.worker_address) as client:
            generation = client.generate(
                self.text,
                max_new_tokens=new_tokens,
                ignore_eos=True,
                policy=self.policy if first else None,
                continues=self.sequence,
                **self.sampling,  # type: ignore[arg-type]
            )
            answer = [token.token for token in generation]
            assert first or generation.sequence_id == self.sequence, "it was computed anew"
            self.sequence = generation.sequence_id
            self.resident.append(generation.summary.counts.tokens_resident)
        self.text += answer
        return answer

    def sets(self) -> list[bytes]:
        """The resident set of every layer, with its scores, once it is reported."""
        seen = len(self.text) - 1
        deadline = time.monotonic() + 20
        request = sequence_pb2.GetSetsRequest(sequence_id=self.sequence)
        while True:
            sets = list(self.group.sequences.GetSets(request, timeout=10))
            if sets and all(one.tokens_seen == seen for one in sets):
                return [one.SerializeToString(deterministic=True) for one in sets]
            assert time.monotonic() < deadline, (seen, sets[:1])
            time.sleep(0.1)

    def wait_finished(self) -> None:
        """All ranks have reported its end."""
        deadline = time.monotonic() + 20
        while not self.group.sequences.Get(sequence_pb2.GetSequenceRequest(sequence_id=self.sequence)).finished:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def set_list(self) -> list[SequenceSet]:
        self.sets()
        with Client(worker=self.group.worker_address, cache=self.group.cache_address) as client:
            return list(client.get_sets(self.sequence))


def _restart_all(group: Cluster) -> None:
    """Every process is killed, and others take their places."""
    assert group.cache is not None
    for process in [*group.workers, group.cache]:
        process.kill()
    group.restart_cache()
    group.restart_workers()


def _client(group: Cluster) -> Client:
    return Client(worker=group.worker_address, cache=group.cache_address)


@pytest.mark.parametrize(
    ("ranks", "policy", "sampling"),
    [
        (3, BOUNDED, {}),
        pytest.param(3, RECALL, {}, marks=takes_long),
        pytest.param(1, RECALL, {}, marks=takes_long),
        (1, FULL, {}),
        (3, RECALL, {"temperature": 0.8, "seed": 5}),
    ],
    ids=["bounded", "recall", "one-rank", "full", "sampled"],
)
def test_a_second_turn_on_a_suspended_session_after_a_restart_of_everything_is_the_same_answer(
    folder: Path, long_prompt: list[int], ranks: int, policy: common_pb2.PolicyOptions, sampling: dict[str, float]
) -> None:
    question = long_prompt[400:425]
    with cluster(
        folder, ranks, cache={"state_dir": folder / "state", "sequence_lease_ms": 15000}, worker=OFTEN
    ) as group:
        talks = [Conversation(group, long_prompt[:150], policy, **sampling) for _ in range(2)]
        answers = [talk.say(FIRST) for talk in talks]
        assert answers[0] == answers[1]
        undisturbed = talks[0].say(SECOND, question)
        with _client(group) as client:
            suspended = client.suspend(talks[1].sequence)
            assert suspended.ttl_ms == 3_600_000
            assert 0 < suspended.tokens_seen <= len(talks[1].text) - 1
        _restart_all(group)
        with _client(group) as client:
            assert client.get(talks[1].sequence).suspended
        assert talks[1].say(SECOND, question) == undisturbed
        assert talks[0].resident == talks[1].resident
        assert talks[0].sets() == talks[1].sets()
        with _client(group) as client:
            assert not client.get(talks[1].sequence).suspended
        # And a third, of both.
        assert talks[0].say(8, long_prompt[500:503]) == talks[1].say(8, long_prompt[500:503])
        with _client(group) as client:
            for talk in talks:
                client.close(talk.sequence)
        _expect_empty(group)


def _expect_empty(group: Cluster) -> None:
    deadline = time.monotonic() + 90
    while any(tier.used_bytes for tier in group.admin.Stats(admin_pb2.StatsRequest()).tiers):
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_a_full_cache_answers_a_second_turn_as_one_long_prompt(folder: Path, long_prompt: list[int]) -> None:
    with cluster(folder, 1, worker={"kv_dtype": "fp32"}) as group:
        talk = Conversation(group, long_prompt[:100], FULL)
        talk.say(20)
        answer = talk.say(20, long_prompt[200:230])
        whole = Conversation(group, talk.text[:-20], FULL)
        assert whole.say(20) == answer


def test_a_running_generation_leaves_the_device_when_it_is_suspended_and_goes_on_later(
    folder: Path, long_prompt: list[int]
) -> None:
    with cluster(folder, 3, worker=OFTEN) as group, _client(group) as client:
        undisturbed = Conversation(group, long_prompt[:100], RECALL).say(400)
        tokens: list[int] = []
        with client.generate(long_prompt[:100], max_new_tokens=400, ignore_eos=True, policy=RECALL) as generation:
            with pytest.raises(HeavywaterError) as ended:
                for token in generation:
                    tokens.append(token.token)
                    if len(tokens) == 60:
                        client.suspend(generation.sequence_id, ttl_s=30)
            assert ended.value.code == "ABORTED"
            assert "suspended" in str(ended.value)
        assert len(tokens) < 400
        rest = client.generate(
            long_prompt[:100] + tokens,
            max_new_tokens=400 - len(tokens),
            ignore_eos=True,
            continues=generation.sequence_id,
        )
        assert tokens + [token.token for token in rest] == undisturbed
        assert rest.sequence_id == generation.sequence_id


def test_a_suspended_sequence_outlives_its_lease_and_pressure_but_not_its_time(
    folder: Path, long_prompt: list[int]
) -> None:
    # 90 pages of 64 KiB a sequence: three fit.
    cache = {"sequence_lease_ms": 1500, "host_bytes": 18 << 20}
    with cluster(folder, 1, cache=cache, worker=OFTEN) as group, _client(group) as client:
        kept, other = (Conversation(group, long_prompt[i : i + 60], BOUNDED) for i in (0, 1))
        kept.say(30)
        client.suspend(kept.sequence, ttl_s=20)
        for shift in range(5):
            other = Conversation(group, long_prompt[shift : shift + 60], BOUNDED)
            other.say(30)
        time.sleep(3)
        with pytest.raises(HeavywaterError) as gone:
            client.get(other.sequence)
        assert gone.value.code == "NOT_FOUND"
        assert client.get(kept.sequence).suspended
        kept.say(4, long_prompt[100:104])
        client.suspend(kept.sequence, ttl_s=2)
        client.resume(kept.sequence)
        assert not client.get(kept.sequence).suspended
        client.suspend(kept.sequence, ttl_s=2)
        time.sleep(3)
        with pytest.raises(HeavywaterError):
            client.get(kept.sequence)


def test_a_suspended_sequence_whose_pages_went_to_disk_comes_back(folder: Path, long_prompt: list[int]) -> None:
    cache = {"host_bytes": 18 << 20, "disk_path": folder / "disk", "state_dir": folder / "state"}
    with cluster(folder, 1, cache=cache, worker=OFTEN) as group, _client(group) as client:
        talks = [Conversation(group, long_prompt[:60], RECALL) for _ in range(2)]
        for talk in talks:
            talk.say(40)
        undisturbed = talks[0].say(30, long_prompt[300:310])
        client.suspend(talks[1].sequence)
        for shift in range(4):
            Conversation(group, long_prompt[shift : shift + 60], BOUNDED).say(30)
        sequence = client.get(talks[1].sequence)
        assert sequence.host_bytes < 90 * 65536, "it is still in host memory"
        _restart_all(group)
        assert talks[1].say(30, long_prompt[300:310]) == undisturbed


def _rows(client: Client, sequence_id: int, positions: range) -> list[np.ndarray]:
    sequence = client.get(sequence_id)
    return [
        np.concatenate([part.ravel() for part in client.read(sequence, layer, head, position, 1)])
        for layer in (0, 17, 29)
        for head in range(3)
        for position in positions
    ]


@pytest.mark.parametrize(("ranks", "policy"), [(3, BOUNDED), (3, RECALL), (1, RECALL)], ids=["bounded", "recall", "1"])
def test_a_truncated_sequence_goes_on_as_one_that_never_went_further(
    folder: Path, long_prompt: list[int], ranks: int, policy: common_pb2.PolicyOptions
) -> None:
    question = long_prompt[400:420]
    cache = {"state_dir": folder / "state"}
    with cluster(folder, ranks, cache=cache, worker={**OFTEN, "page_tokens": 32}) as group, _client(group) as client:
        short, far, told = (Conversation(group, long_prompt[:150], policy) for _ in range(3))
        short.say(40)
        for talk in (far, told):
            assert talk.say(150)[:40] == short.text[150:]
        kept = len(short.text) - 1
        before = client.get(far.sequence).host_bytes
        far.wait_finished()
        client.truncate(far.sequence, kept)
        assert client.get(far.sequence).num_tokens == kept
        assert client.get(far.sequence).host_bytes < before
        with pytest.raises(HeavywaterError) as beyond:
            client.read(client.get(far.sequence), 0, 0, kept, 1)
        assert beyond.value.code == "OUT_OF_RANGE"
        _restart_all(group)
        for talk in (far, told):  # the second one is not truncated: its text says so
            talk.text = list(short.text)
        answers = [talk.say(30, question) for talk in (short, far, told)]
        assert answers[0] == answers[1] == answers[2]
        sets = [talk.set_list() for talk in (short, far, told)]
        rows = [_rows(client, talk.sequence, range(kept - 20, len(talk.text) - 1, 3)) for talk in (short, far, told)]
        for other in (1, 2):
            for one, two in zip(sets[0], sets[other], strict=True):
                assert one.resident.tolist() == two.resident.tolist()
                assert one.demoted.tolist() == two.demoted.tolist()
                np.testing.assert_allclose(one.scores, two.scores, rtol=1e-3, atol=1e-3)
            for row, same in zip(rows[0], rows[other], strict=True):
                np.testing.assert_allclose(row.astype(np.float32), same.astype(np.float32), atol=0.05, rtol=0.02)
        for talk in (short, far, told):
            client.close(talk.sequence)
        _expect_empty(group)


def test_what_cannot_be_suspended_or_truncated_is_refused_by_name(folder: Path, long_prompt: list[int]) -> None:
    with cluster(folder, 1, worker=OFTEN) as group, _client(group) as client:
        for call in (lambda: client.suspend(12345), lambda: client.resume(12345), lambda: client.truncate(12345, 10)):
            with pytest.raises(HeavywaterError) as unknown:
                call()
            assert unknown.value.code == "NOT_FOUND"
            assert "12345" in str(unknown.value)
        talk = Conversation(group, long_prompt[:60], FULL)
        talk.say(10)
        talk.wait_finished()
        for tokens in (-1, 0, 59, 1000):
            with pytest.raises(HeavywaterError) as outside:
                client.truncate(talk.sequence, tokens)
            assert outside.value.code == "OUT_OF_RANGE"
            assert f"tokens is {tokens}" in str(outside.value)
        with client.generate(long_prompt[:60], max_new_tokens=400, ignore_eos=True) as running:
            next(iter(running))
            with pytest.raises(HeavywaterError) as runs:
                client.truncate(running.sequence_id, 60)
            assert runs.value.code == "FAILED_PRECONDITION"
        with pytest.raises(HeavywaterError) as other:
            list(client.generate([*talk.text, 5], max_new_tokens=4, policy=BOUNDED, continues=talk.sequence))
        assert other.value.code == "FAILED_PRECONDITION"
        assert "policy" in str(other.value)
        with pytest.raises(HeavywaterError) as long:
            list(client.generate([*talk.text, 5], max_new_tokens=9000, continues=talk.sequence))
        assert long.value.code == "OUT_OF_RANGE"
        assert talk.say(4, [5]), "it is as it was"


def test_a_turn_whose_sequence_is_gone_is_computed_anew_and_bad_ones_are_refused(
    folder: Path, long_prompt: list[int]
) -> None:
    with cluster(folder, 1, worker=OFTEN) as group, _client(group) as client:
        talk = Conversation(group, long_prompt[:60], FULL)
        talk.say(10)
        with pytest.raises(HeavywaterError) as short:
            list(client.generate(long_prompt[:60], max_new_tokens=4, continues=talk.sequence))
        assert short.value.code == "INVALID_ARGUMENT"
        assert "tokens has 60 ids" in str(short.value)
        with pytest.raises(HeavywaterError) as text:
            list(client.generate("Once", max_new_tokens=4, continues=talk.sequence))
        assert text.value.code == "INVALID_ARGUMENT"
        with pytest.raises(HeavywaterError) as early:
            client.suspend(talk.sequence, ttl_s=1e6)
        assert early.value.code == "INVALID_ARGUMENT"
        client.close(talk.sequence)
        anew = client.generate(
            [*talk.text, 5, 6, 7], max_new_tokens=4, ignore_eos=True, policy=FULL, continues=talk.sequence
        )
        assert len(list(anew)) == 4
        assert anew.sequence_id != talk.sequence
