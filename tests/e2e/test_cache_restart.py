"""The cache service ends, killed or in order, and starts again: nothing is lost."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from cluster import Cluster, cluster, summary, token_ids
from heavywater import Client
from heavywater.v1 import admin_pb2, common_pb2, generation_pb2, page_store_pb2, sequence_pb2

TOKENS = 120
BOUNDED = common_pb2.PolicyOptions(policy="snapkv_h2o", heavy_tokens=48, recent_tokens=16)
RECALL = common_pb2.PolicyOptions(policy="recall", heavy_tokens=48, recent_tokens=16)
LAYERS = 30
HEADS = 3
PAGE_TOKENS = 256


def _kill(group: Cluster) -> None:
    assert group.cache is not None
    group.cache.kill()


def _terminate(group: Cluster) -> None:
    assert group.cache is not None
    assert group.cache.terminate() == 0


def _stats(group: Cluster) -> admin_pb2.StatsResponse:
    """The connection to the process of before may not have noticed yet."""
    for _ in range(20):
        try:
            return group.admin.Stats(admin_pb2.StatsRequest(), timeout=10)
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.UNAVAILABLE
            time.sleep(0.1)
    raise AssertionError("the cache service does not answer")


def _request(prompt: list[int], policy: common_pb2.PolicyOptions) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(tokens=prompt, max_new_tokens=TOKENS, ignore_eos=True, policy=policy)


def _run(
    group: Cluster, request: generation_pb2.GenerateRequest, events: dict[int, Callable[[], None]]
) -> tuple[list[int], generation_pb2.GenerateSummary, int]:
    """Token ids, the summary, the sequence; events run when so many tokens have come."""
    messages = []
    for message in group.generation.Generate(request, timeout=300):
        messages.append(message)
        if message.HasField("index"):
            events.get(message.index + 1, lambda: None)()
    return token_ids(messages), summary(messages), messages[0].sequence_id


def _sets(group: Cluster, sequence: int, plan: int) -> list[sequence_pb2.SequenceSet]:
    deadline = time.monotonic() + 20
    while True:
        sets = list(group.sequences.GetSets(sequence_pb2.GetSetsRequest(sequence_id=sequence), timeout=10))
        if sets and all(one.plan == plan for one in sets):
            return sets
        assert time.monotonic() < deadline, f"plan {plan} is not reported: {sets[:1]}"
        time.sleep(0.1)


def _reported(group: Cluster, sequence: int, tokens: int) -> sequence_pb2.Sequence:
    """Reports come behind the step, and later still over an outage: waits for those of so many tokens."""
    deadline = time.monotonic() + 20
    while True:
        got = group.sequences.Get(sequence_pb2.GetSequenceRequest(sequence_id=sequence), timeout=10)
        if got.num_tokens >= tokens:
            return got
        assert time.monotonic() < deadline, f"{got.num_tokens} of {tokens} tokens are reported"
        time.sleep(0.1)


def _rows(group: Cluster, sequence: int, seen: int) -> list[bytes]:
    """Every byte of K and V of some layers and all heads."""
    rows = []
    for layer in (0, 7, LAYERS - 1):
        for head in range(HEADS):
            for first in range(0, seen, PAGE_TOKENS):
                request = page_store_pb2.ReadRequest(
                    sequence_id=sequence,
                    layer=layer,
                    kv_head=head,
                    first_position=first,
                    num_positions=min(PAGE_TOKENS, seen - first),
                )
                rows.append(b"".join(chunk.rows for chunk in group.pages.Read(request, timeout=20)))
    return rows


def _without_ids(sets: list[sequence_pb2.SequenceSet]) -> list[bytes]:
    return [one.SerializeToString(deterministic=True) for one in sets]


def _expect_empty(group: Cluster, sequences: list[int]) -> None:
    for sequence in sequences:
        group.sequences.Close(sequence_pb2.CloseSequenceRequest(sequence_id=sequence))
    deadline = time.monotonic() + 40
    while True:
        stats = _stats(group)
        for tier in stats.tiers:
            assert tier.free_bytes + tier.used_bytes == tier.total_bytes
        if not any(tier.used_bytes for tier in stats.tiers):
            return
        assert time.monotonic() < deadline, stats
        time.sleep(0.2)


@pytest.mark.parametrize("end", [_kill, _terminate], ids=["killed", "in-order"])
@pytest.mark.parametrize(
    ("policy", "worker"),
    [(BOUNDED, {}), (RECALL, {}), (RECALL, {"disable_slab": True})],
    ids=["bounded", "recall", "streamed"],
)
def test_a_generation_goes_on_over_the_end_of_the_cache_service(
    folder: Path,
    long_prompt: list[int],
    policy: common_pb2.PolicyOptions,
    worker: dict[str, object],
    end: Callable[[Cluster], None],
) -> None:
    cache = {"state_dir": folder / "state", "sequence_lease_ms": 20000}
    request = _request(long_prompt[:300], policy)
    with cluster(folder, 3, cache=cache, worker=worker) as group:
        undisturbed, figures, first = _run(group, request, {})
        epoch = group.sequences.Get(sequence_pb2.GetSequenceRequest(sequence_id=first)).epoch
        disturbed, after, second = _run(
            group,
            request,
            {10: lambda: end(group), 40: group.restart_cache, 80: lambda: (end(group), group.restart_cache())[1]},
        )
        assert disturbed == undisturbed
        assert after.counts == figures.counts, "positions were dropped"
        got = _reported(group, second, 300 + TOKENS - 1)
        assert got.epoch == epoch, "the ranks had to join anew"
        assert list(got.tokens) == long_prompt[:300] + disturbed[:-1]
        # Finished before the restarts, and in the middle of them: the same sets and bytes.
        assert _without_ids(_sets(group, second, after.plan)) == _without_ids(_sets(group, first, figures.plan))
        assert _rows(group, second, after.counts.tokens_seen) == _rows(group, first, figures.counts.tokens_seen)
        assert "pages of a sequence are no longer kept" not in group.workers[0].log.read_text()
        assert len(token_ids(group.generate(tokens=long_prompt[:16], max_new_tokens=4, ignore_eos=True))) == 4
        _expect_empty(group, [first, second])


def test_a_rank_that_dies_after_the_restart_is_restored_from_the_state_of_before(
    folder: Path, long_prompt: list[int]
) -> None:
    cache = {"state_dir": folder / "state"}
    request = _request(long_prompt[:120], RECALL)
    with cluster(folder, 3, cache=cache, worker={"snapshot_interval_tokens": 12}) as group:
        undisturbed, _, _ = _run(group, request, {})
        tokens: list[int] = []
        with Client(worker=group.worker_address) as client:
            generation = client.generate(long_prompt[:120], max_new_tokens=TOKENS, ignore_eos=True, policy=RECALL)
            for token in generation:
                tokens.append(token.token)
                if len(tokens) == 50:
                    _kill(group)
                    group.restart_cache()
                    group.workers[1].kill()
                    group.restart_worker(1)
        assert tokens == undisturbed
        log = group.workers[0].log.read_text()
        assert "computed again" not in log, "it was computed again, not restored"
        assert 'restored_tokens="1' in log


def test_pages_on_disk_are_there_after_a_restart(folder: Path, long_prompt: list[int]) -> None:
    # 90 pages of 64 KiB a sequence: four sequences do not fit.
    cache = {"state_dir": folder / "state", "disk_path": folder / "disk", "host_bytes": 20 << 20}
    with cluster(folder, 1, cache=cache) as group:
        written = []
        for shift in range(6):
            messages = group.generate(
                tokens=long_prompt[shift : shift + 100], max_new_tokens=8, ignore_eos=True, policy=BOUNDED
            )
            sequence = messages[0].sequence_id
            written.append((sequence, summary(messages).counts.tokens_seen))
        before = {sequence: _rows(group, sequence, seen) for sequence, seen in written}
        stats = _stats(group)
        assert stats.tiers[1].pages > 0, "nothing has gone down"
        for end in (_kill, _terminate):
            end(group)
            group.restart_cache()
            again = _stats(group)
            assert [t.pages for t in again.tiers] == [t.pages for t in stats.tiers]
            assert [t.used_bytes for t in again.tiers] == [t.used_bytes for t in stats.tiers]
            for sequence, seen in written:
                assert _rows(group, sequence, seen) == before[sequence]
            stats = _stats(group)  # reads bring pages up
        _expect_empty(group, [sequence for sequence, _ in written])


def test_a_state_of_another_slab_or_version_is_discarded_and_the_log_says_why(
    folder: Path, long_prompt: list[int]
) -> None:
    state = folder / "state"
    short = {"tokens": long_prompt[:16], "max_new_tokens": 4, "ignore_eos": True}
    with cluster(folder, 1, cache={"state_dir": state}) as group:
        expected = token_ids(group.generate(**short))
        assert group.cache is not None
        reasons = []

        def restart(reason: str, **changed: object) -> None:
            group.restart_cache(**changed)
            assert group.cache is not None
            log = group.cache.log.read_text()
            reasons.append(reason)
            assert log.count("the kept state is discarded") == len(reasons), log[-2000:]
            assert reason in log
            assert _stats(group).tiers[0].used_bytes == 0
            deadline = time.monotonic() + 20
            while _stats(group).ranks != 1:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            assert token_ids(group.generate(**short)) == expected

        # Of a version before those that are read, and of the next one: both are named.
        for version in (0, 3):
            _kill(group)
            (state / "HEAVYWATER_STATE").write_text(f"heavywater state {version}\n")
            restart(f"heavywater state {version}")
            assert "this service writes" in group.cache.log.read_text()
        for version in (1, 3):
            _kill(group)
            slab = Path("/dev/shm") / re.findall(r'slab="([^"]+)"', group.cache.log.read_text())[-1]
            with slab.open("r+b") as memory:
                memory.seek(8)
                memory.write(version.to_bytes(4, "little"))
            restart(f"has format version {version}, want 2")
        _kill(group)
        restart("host_bytes", host_bytes=512 << 20)
        _terminate(group)
        for slab in Path("/dev/shm").glob("heavywater-state-*"):
            if f'slab="{slab.name}"' in group.cache.log.read_text():
                slab.unlink()
        restart("its slab is gone", host_bytes=512 << 20)
