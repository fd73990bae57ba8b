"""What is appended after the prompt has been compressed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from cluster import cluster, summary, token_ids
from heavywater.v1 import sequence_pb2


@pytest.mark.parametrize("size", [1, 3])
def test_a_full_cache_does_not_tell_a_suffix_from_the_prompt(
    folder: Path, expected: list[dict[str, object]], size: int
) -> None:
    with cluster(folder, size, worker={"kv_dtype": "fp32"}) as group:
        for prompt in expected:
            ids = prompt["prompt_ids"]
            at = max(1, len(ids) // 2)
            messages = group.generate(
                tokens=ids[:at],
                suffix_tokens=ids[at:],
                max_new_tokens=len(prompt["ids"]),
                ignore_eos=True,
                policy={"policy": "full"},
            )
            assert token_ids(messages) == prompt["ids"], prompt["name"]
            assert summary(messages).suffix_tokens == len(ids) - at


def test_a_suffix_is_registered_and_recent_in_every_layer(folder: Path, expected: list[dict[str, object]]) -> None:
    ids = max((prompt["prompt_ids"] for prompt in expected), key=len)
    prompt, suffix = ids[:-20], ids[-20:]
    policy = {"policy": "snapkv_h2o", "heavy_tokens": 16, "recent_tokens": 32}
    with cluster(folder, 3) as group:
        messages = group.generate(tokens=prompt, suffix_tokens=suffix, max_new_tokens=4, ignore_eos=True, policy=policy)
        figures, sequence = summary(messages), messages[0].sequence_id
        assert figures.counts.tokens_seen == len(ids) + 3
        assert figures.counts.tokens_resident == min(48, len(ids) + 3)
        deadline = time.monotonic() + 10
        while True:
            sets = list(group.sequences.GetSets(sequence_pb2.GetSetsRequest(sequence_id=sequence), timeout=10))
            if sets and all(one.plan == figures.plan for one in sets):
                break
            assert time.monotonic() < deadline, f"plan {figures.plan}, reported: {sets[:1]}"
            time.sleep(0.05)
        for one in sets:
            assert set(range(len(prompt), len(ids))) <= set(one.recent), one.layer
        stored = group.sequences.Get(sequence_pb2.GetSequenceRequest(sequence_id=sequence), timeout=10)
        assert list(stored.tokens) == ids + token_ids(messages)[:-1]
