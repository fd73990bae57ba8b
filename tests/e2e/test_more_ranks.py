"""More ranks than KV heads: three ranks hold each KV head, feed-forward and vocabulary are split unevenly."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import cluster, summary, token_ids

NEW_TOKENS = 6


@pytest.mark.parametrize("policy", [{"policy": "full"}, {"policy": "snapkv_h2o", "scope": "layer"}])
def test_nine_ranks_give_the_tokens_of_one(
    folder: Path, expected: list[dict[str, object]], policy: dict[str, object]
) -> None:
    prompt = min((case["prompt_ids"] for case in expected), key=len)  # type: ignore[arg-type,return-value]
    ids = {}
    for size in (1, 9):
        with cluster(folder / str(size), size, worker={"kv_dtype": "fp32"}) as group:
            messages = group.generate(tokens=prompt, max_new_tokens=NEW_TOKENS, ignore_eos=True, policy=policy)
            assert summary(messages).tensor_parallel == size
            ids[size] = token_ids(messages)
    assert ids[9] == ids[1]
    if policy["policy"] == "full":
        (recorded,) = (case["ids"] for case in expected if case["prompt_ids"] == prompt)
        assert ids[9] == recorded[:NEW_TOKENS]  # type: ignore[index]
