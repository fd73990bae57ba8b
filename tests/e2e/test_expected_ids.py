"""Full cache: greedy tokens equal to an independent implementation's."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import cluster, token_ids


@pytest.mark.parametrize("size", [1, 3])
def test_greedy_tokens_of_the_full_cache_equal_the_reference(
    folder: Path, expected: list[dict[str, object]], size: int
) -> None:
    with cluster(folder, size, worker={"kv_dtype": "fp32"}) as group:
        for prompt in expected:
            messages = group.generate(
                tokens=prompt["prompt_ids"],
                max_new_tokens=len(prompt["ids"]),
                ignore_eos=True,
                policy={"policy": "full"},
            )
            assert token_ids(messages) == prompt["ids"], prompt["name"]
