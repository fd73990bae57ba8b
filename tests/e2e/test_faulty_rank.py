"""A rank whose scores do not reach the others is an error, not a slow drift."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from cluster import cluster, token_ids


@pytest.mark.parametrize("policy", ["snapkv_h2o", "h2o"])
def test_a_rank_that_contributes_no_scores_stops_the_sequence(
    folder: Path, long_prompt: list[int], policy: str
) -> None:
    request = {"tokens": long_prompt[:400], "max_new_tokens": 8, "ignore_eos": True}
    bounded = {"policy": policy, "heavy_tokens": 64, "recent_tokens": 64}
    with cluster(folder, 3, worker_binary="heavywater-faulty-worker") as group:
        with pytest.raises(grpc.RpcError) as refused:
            group.generate(**request, policy=bounded)
        assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION, refused.value
        assert "layer 0" in refused.value.details(), refused.value.details()
        # Without scores there is nothing to lose: the group goes on.
        assert len(token_ids(group.generate(**request, policy={"policy": "full"}))) == 8
