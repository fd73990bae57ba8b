"""Recall through real processes: what left the device is attended to from host memory."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

import grpc
import numpy as np
import pytest
from cluster import Cluster, cluster, summary, token_ids
from heavywater.v1 import generation_pb2

NEW_TOKENS = 40
LAYERS, KV_HEADS = 30, 3
FULL = {"policy": "full"}
# A tenth of the bytes.
RECALL = {"policy": "recall", "device_ratio": 0.1, "min_budget_tokens": 1}


def generate(group: Cluster, tokens: list[int], policy: dict[str, object], **more: object) -> list[object]:
    return group.generate(tokens=tokens, max_new_tokens=NEW_TOKENS, ignore_eos=True, policy=policy, **more)


def logits_of(messages: list[generation_pb2.GenerateResponse]) -> np.ndarray:
    return np.stack([np.frombuffer(message.logits, "<f4") for message in messages if message.HasField("index")])


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("scope", ["layer", "kv_head"])
def test_recall_of_everything_equals_the_full_cache(
    folder: Path, long_prompt: list[int], size: int, scope: str
) -> None:
    # A part of the text comes as a suffix: every token of it recalls for itself.
    prompt, suffix = long_prompt[:-70], long_prompt[-70:]
    with cluster(folder, size, worker={"kv_dtype": "fp32"}) as group:
        full = generate(group, prompt, FULL, suffix_tokens=suffix, return_logits=True)
        everything = {**RECALL, "scope": scope, "recall_all": True}
        recalled = generate(group, prompt, everything, suffix_tokens=suffix, return_logits=True)
    assert token_ids(recalled) == token_ids(full)
    assert np.abs(logits_of(recalled) - logits_of(full)).max() < 1e-3
    figures = summary(recalled)
    assert figures.counts.tokens_resident < 0.2 * figures.counts.tokens_seen
    assert figures.recall.reads_max > 64
    assert figures.recall.mass_missing == 0


@pytest.mark.parametrize("size", [1, 3])
def test_the_summary_and_the_metrics_count_what_was_read(folder: Path, long_prompt: list[int], size: int) -> None:
    per_rank = {rank: {"metrics_address": "127.0.0.1:0"} for rank in range(size)}
    with cluster(folder, size, worker={"kv_dtype": "fp32"}, per_rank=per_rank) as group:
        figures = summary(generate(group, long_prompt, {**RECALL, "recall_tokens": 16}))
        recall = figures.recall
        # Each decode step's token, in each layer and KV head of all ranks; the last is given out, not taken in.
        assert recall.queries == (NEW_TOKENS - 1) * LAYERS * KV_HEADS
        assert recall.queries < recall.reads <= 16 * recall.queries
        assert recall.reads_max == 16
        assert recall.promoted > 0
        assert 0 < recall.mass_missing < 0.5
        assert 0 < recall.sketch_bytes < 0.05 * figures.full_cache_bytes
        assert (figures.budget.recall, figures.budget.recall_tokens) == (True, 16)
        # The open page of what was decoded may come on top.
        assert figures.device_bytes_peak <= 0.105 * figures.full_cache_bytes
        assert not summary(generate(group, long_prompt[:300], FULL)).HasField("recall")
        metrics = [metrics_of(group, rank) for rank in range(size)]
        assert sum(one["heavywater_recall_reads_total"] for one in metrics) == recall.reads
        assert metrics[0]["heavywater_promoted_total"] == pytest.approx(recall.promoted)
        assert 0 < metrics[0]["heavywater_attention_mass_missing_ratio"] < 0.5


def metrics_of(group: Cluster, rank: int) -> dict[str, float]:
    """Those without labels."""
    address = group.workers[rank].wait_for_line("metrics on ")
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as page:
        text = page.read().decode()
    return {name: float(value) for name, value in re.findall(r"^(\w+) (\S+)$", text, re.MULTILINE)}


def test_recall_without_a_host_tier_is_refused(folder: Path, long_prompt: list[int]) -> None:
    with cluster(folder, 1, cache=None) as group:
        with pytest.raises(grpc.RpcError) as refused:
            generate(group, long_prompt[:100], RECALL)
        assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert "recall" in refused.value.details()


def test_three_ranks_recall_what_one_does(folder: Path, long_prompt: list[int]) -> None:
    found = []
    for size in (1, 3):
        with cluster(folder / str(size), size, worker={"kv_dtype": "fp32"}) as group:
            messages = generate(group, long_prompt, RECALL)
            found.append((token_ids(messages), summary(messages).recall))
    assert found[0][0] == found[1][0]
    # Positions at a threshold may fall on either side: Q and K were computed in another order.
    assert found[1][1].reads == pytest.approx(found[0][1].reads, rel=0.01)
    assert found[1][1].promoted == pytest.approx(found[0][1].promoted, rel=0.05)
