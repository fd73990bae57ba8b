"""Which demoted positions an answer has read, through real processes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import grpc
import pytest
from cluster import cluster, summary
from heavywater.v1 import generation_pb2

NEW_TOKENS = 6
QUERIES = 30 * 3  # of a token: layers x KV heads
RECALL = {"policy": "recall", "device_ratio": 0.1, "min_budget_tokens": 1, "recall_tokens": 2}


def reads_of(message: generation_pb2.GenerateResponse) -> Counter[int]:
    return Counter({one.position: one.count for one in message.reads})


@pytest.mark.parametrize("size", [1, 3])
def test_reads_of_all_ranks_are_those_that_the_summary_counts(folder: Path, long_prompt: list[int], size: int) -> None:
    with cluster(folder, size, worker={"kv_dtype": "fp32"}) as group:
        prompt = {"tokens": long_prompt, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        messages = group.generate(**prompt, policy=RECALL, return_reads=True)
        tokens = [message for message in messages if message.HasField("index")]
        assert not tokens[0].reads
        # Two reads of each query: fewer positions than a response has room for.
        for message in tokens[1:]:
            assert 0 < len(message.reads) < 256
            assert 0 < reads_of(message).total() <= 2 * QUERIES
            assert max(reads_of(message)) < len(long_prompt)
        assert sum(reads_of(message).total() for message in tokens) == summary(messages).recall.reads
        silent = group.generate(**prompt, policy=RECALL)
        assert not any(message.reads for message in silent)
        assert [message.token for message in silent] == [message.token for message in messages]
        with pytest.raises(grpc.RpcError) as refused:
            group.generate(**prompt, policy={"policy": "snapkv_h2o"}, return_reads=True)
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "return_reads" in refused.value.details()
