"""The cache service may die: generations neither stop nor change."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import grpc
import pytest
from cluster import cluster, summary, token_ids
from heavywater.v1 import admin_pb2, error_details_pb2, generation_pb2, sequence_pb2


def test_killing_the_cache_service_changes_no_token(folder: Path, long_prompt: list[int]) -> None:
    request = generation_pb2.GenerateRequest(tokens=long_prompt, max_new_tokens=96, ignore_eos=True)
    with cluster(folder, 3) as group:
        undisturbed = token_ids(list(group.generation.Generate(request, timeout=300)))
        disturbed = []
        for message in group.generation.Generate(request, timeout=300):
            if message.HasField("index"):
                disturbed.append(message.token)
            if len(disturbed) == 8 and group.cache is not None and group.cache.alive():
                group.cache.kill()
        assert disturbed == undisturbed
        assert all(worker.alive() for worker in group.workers)
        with pytest.raises(grpc.RpcError) as refused:
            group.generate(tokens=long_prompt, max_new_tokens=1)
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE


def test_a_rank_that_hears_nothing_for_a_lease_stops_writing_to_the_slab_and_goes_on(
    folder: Path, long_prompt: list[int]
) -> None:
    request = generation_pb2.GenerateRequest(tokens=long_prompt[:64], max_new_tokens=300, ignore_eos=True)
    with cluster(folder, 3, cache={"sequence_lease_ms": 1500}) as group:
        undisturbed = token_ids(list(group.generation.Generate(request, timeout=300)))
        assert group.cache is not None
        stopped = 0.0
        disturbed = []
        try:
            for message in group.generation.Generate(request, timeout=300):
                if message.HasField("index"):
                    disturbed.append(message.token)
                if len(disturbed) == 8 and not stopped:
                    os.kill(group.cache.pid, signal.SIGSTOP)
                    stopped = time.monotonic()
            assert time.monotonic() - stopped > 1.5, "the text was too short to outlive the lease"
        finally:
            os.kill(group.cache.pid, signal.SIGCONT)
        assert disturbed == undisturbed
        # Nothing was written to the slab after the fence, on any rank.
        for worker in group.workers:
            assert "pages of a sequence are no longer kept" in worker.log.read_text()
        # Nothing of it stays behind.
        deadline = time.monotonic() + 30
        while group.admin.Stats(admin_pb2.StatsRequest()).tiers[0].used_bytes and time.monotonic() < deadline:
            time.sleep(0.2)
        assert group.admin.Stats(admin_pb2.StatsRequest()).tiers[0].used_bytes == 0
        assert len(token_ids(group.generate(tokens=long_prompt[:16], max_new_tokens=4, ignore_eos=True))) == 4


def test_a_full_slab_stops_the_sequence_and_names_need_and_limit(folder: Path, long_prompt: list[int]) -> None:
    # A page of this model is 64 KiB at 16 bits; a prompt of 5 pages needs 450 of them.
    with cluster(folder, 1, cache={"host_bytes": 8 << 20}, worker={"on_host_full": "stop"}) as group:
        with pytest.raises(grpc.RpcError) as refused:
            group.generate(tokens=long_prompt, max_new_tokens=4)
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        short = group.generate(tokens=long_prompt[:16], max_new_tokens=4, ignore_eos=True)
        assert len(token_ids(short)) == 4


def test_finished_sequences_make_room_for_the_next(folder: Path, long_prompt: list[int]) -> None:
    # Room for one at a time; none is closed, and no lease ends meanwhile.
    with cluster(folder, 1, cache={"host_bytes": 8 << 20}) as group:
        ids = []
        for _ in range(4):
            messages = group.generate(tokens=long_prompt[:16], max_new_tokens=4, ignore_eos=True)
            assert len(token_ids(messages)) == 4
            ids.append(messages[0].sequence_id)
        with pytest.raises(grpc.RpcError) as gone:
            group.sequences.Get(sequence_pb2.GetSequenceRequest(sequence_id=ids[0]))
        assert gone.value.code() == grpc.StatusCode.NOT_FOUND
        assert "make room" in gone.value.details()


def test_a_refusal_for_lack_of_room_carries_quota_failure(folder: Path, long_prompt: list[int]) -> None:
    with cluster(folder, 1, cache={"host_bytes": 8 << 20}, worker={"on_host_full": "stop"}) as group:
        with pytest.raises(grpc.RpcError) as refused:
            group.generate(tokens=long_prompt, max_new_tokens=4)
        trailers = dict(refused.value.trailing_metadata())
        status = error_details_pb2.RpcStatus.FromString(trailers["grpc-status-details-bin"])
        assert status.details[0].type_url == "type.googleapis.com/google.rpc.QuotaFailure"
        failure = error_details_pb2.QuotaFailure.FromString(status.details[0].value)
        assert failure.violations[0].subject == "host_bytes"
        assert len(status.details) == 1, "it never fits: there is no RetryInfo"


# One page of every layer and head of this model takes 90 x 64 KiB: 8 MiB hold the
# first 256 positions, and the next page is refused in the middle of the sequence.
ONE_PAGE = {"host_bytes": 8 << 20}
SMALL = {"heavy_tokens": 16, "recent_tokens": 16}


def test_positions_without_host_pages_count_as_dropped_once_evicted(folder: Path, long_prompt: list[int]) -> None:
    with cluster(folder, 1, cache=ONE_PAGE, worker={"on_host_full": "drop"}) as group:
        messages = group.generate(tokens=long_prompt[:240], max_new_tokens=120, ignore_eos=True, policy=SMALL)
    counts = summary(messages).counts
    assert len(token_ids(messages)) == 120
    assert counts.tokens_dropped > 0
    total = counts.tokens_resident + counts.tokens_demoted + counts.tokens_dropped
    assert total == pytest.approx(counts.tokens_seen)


def test_a_sequence_may_stop_where_host_pages_end(folder: Path, long_prompt: list[int]) -> None:
    request = generation_pb2.GenerateRequest(
        tokens=long_prompt[:240], max_new_tokens=120, ignore_eos=True, policy=SMALL
    )
    received = []
    with cluster(folder, 1, cache=ONE_PAGE, worker={"on_host_full": "stop"}) as group:
        with pytest.raises(grpc.RpcError) as refused:
            for message in group.generation.Generate(request, timeout=300):
                received.append(message)
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert 0 < len(token_ids(received)) < 120
        # Its pages stay until the lease ends, or it is closed.
        group.sequences.Close(sequence_pb2.CloseSequenceRequest(sequence_id=received[0].sequence_id))
        assert len(token_ids(group.generate(tokens=long_prompt[:16], max_new_tokens=4, ignore_eos=True))) == 4


def test_sigterm_ends_every_process_with_code_0_even_with_an_open_stream(folder: Path, long_prompt: list[int]) -> None:
    request = generation_pb2.GenerateRequest(tokens=long_prompt[:64], max_new_tokens=4000, ignore_eos=True)
    with cluster(folder, 3, worker={"drain_ms": 1000}, cache={"drain_ms": 1000}) as group:
        stream = group.generation.Generate(request, timeout=300)
        next(stream)
        started = time.monotonic()
        assert group.workers[0].terminate() == 0
        assert [worker.terminate() for worker in group.workers[1:]] == [0, 0]
        assert group.cache is not None
        assert group.cache.terminate() == 0
        assert time.monotonic() - started < 30
