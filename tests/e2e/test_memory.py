"""Device memory is bounded, counted, and refused by name when it is not enough."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from cluster import Cluster, cluster, summary, token_ids

LIMIT_BYTES = 48 << 20
EXPLICIT = {"policy": "snapkv_h2o", "heavy_tokens": 128, "recent_tokens": 128}


def test_snapkv_h2o_at_a_fifth_holds_at_most_a_quarter_of_the_full_cache(folder: Path, long_prompt: list[int]) -> None:
    policy = {"policy": "snapkv_h2o", "heavy_ratio": 0.1, "recent_ratio": 0.1, "min_budget_tokens": 1}
    with cluster(folder, 3) as group:
        layers = 30
        result = summary(group.generate(tokens=long_prompt, max_new_tokens=32, ignore_eos=True, policy=policy))
    full_of_prompt = _page_up(len(long_prompt)) * result.full_cache_bytes / _page_up(result.counts.tokens_seen)
    assert result.device_bytes_peak <= 0.25 * full_of_prompt
    one_layer = _page_up(len(long_prompt)) * (result.full_cache_bytes / _page_up(result.counts.tokens_seen)) / layers
    # One layer's whole KV with its score tables (8 + 4 bytes a position), no more.
    assert result.device_bytes_prompt_peak <= result.device_bytes_peak + 1.1 * one_layer
    assert result.device_bytes_prompt_peak > result.device_bytes_peak


def _page_up(tokens: int) -> int:
    return -(-tokens // 256) * 256


def _refused(group: Cluster, tokens: list[int], new: int, policy: dict[str, object]) -> grpc.RpcError | None:
    try:
        group.generate(tokens=tokens, max_new_tokens=new, ignore_eos=True, policy=policy)
    except grpc.RpcError as error:
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED, error
        return error
    return None


def _repeat(tokens: list[int], count: int) -> list[int]:
    return (tokens * (count // len(tokens) + 1))[:count]


def test_where_full_refuses_at_n_tokens_snapkv_h2o_finishes_four_n(folder: Path, long_prompt: list[int]) -> None:
    with cluster(folder, 1, worker={"device_memory_bytes": LIMIT_BYTES}) as group:
        tokens = 1024
        error = _refused(group, _repeat(long_prompt, tokens), 1, {"policy": "full"})
        while error is None:
            tokens += 256
            assert tokens <= 2048, "the limit is too large for this test"
            error = _refused(group, _repeat(long_prompt, tokens), 1, {"policy": "full"})
        for part in ("need", "limit", "longest prompt"):
            assert part in error.details(), error.details()
        messages = group.generate(
            tokens=_repeat(long_prompt, 4 * tokens - 8), max_new_tokens=8, ignore_eos=True, policy=EXPLICIT
        )
        assert len(token_ids(messages)) == 8
        assert summary(messages).counts.tokens_seen >= 4 * tokens - 1


def _most_at_once(group: Cluster, start: Callable[[], grpc.Call], limit: int, patience_s: float) -> int:
    """How many sequences hold device memory at the same time: each has its first token within the patience."""
    first_token = [threading.Event() for _ in range(limit)]
    calls = []
    threads = []
    for event in first_token:
        call = start()
        calls.append(call)

        def read(call: grpc.Call = call, event: threading.Event = event) -> None:
            try:
                for _ in call:
                    event.set()
            except grpc.RpcError:
                pass

        threads.append(threading.Thread(target=read, daemon=True))
        threads[-1].start()
        if not event.wait(timeout=patience_s):
            break
    running = sum(event.is_set() for event in first_token)
    for call in calls:
        call.cancel()
    for thread in threads:
        thread.join(timeout=10)
    return running


@pytest.mark.parametrize("prompt_tokens", [1000])
def test_at_least_four_times_as_many_sequences_run_at_once(
    folder: Path, long_prompt: list[int], prompt_tokens: int
) -> None:
    from heavywater.v1 import generation_pb2

    def start_with(policy: dict[str, object]) -> Callable[[], grpc.Call]:
        request = generation_pb2.GenerateRequest(
            tokens=_repeat(long_prompt, prompt_tokens), max_new_tokens=4000, ignore_eos=True, policy=policy
        )
        return lambda: group.generation.Generate(request, timeout=300)

    with cluster(folder, 1, worker={"device_memory_bytes": 256 << 20}) as group:
        full = _most_at_once(group, start_with({"policy": "full"}), 4, patience_s=20)
        assert full >= 1
        bounded = _most_at_once(group, start_with({**EXPLICIT}), 4 * full, patience_s=90)
    assert bounded >= 4 * full
