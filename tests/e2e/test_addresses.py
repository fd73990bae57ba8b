"""Ranks need not share an address: nothing assumes localhost."""

from __future__ import annotations

from pathlib import Path

from cluster import cluster, token_ids


def test_ranks_on_different_addresses_generate_the_expected_tokens(
    folder: Path, expected: list[dict[str, object]]
) -> None:
    per_rank = {
        rank: {"comm_address": f"127.0.0.{rank + 2}", "listen_address": f"127.0.0.{rank + 2}:0"} for rank in range(3)
    }
    prompt = expected[0]
    with cluster(folder, 3, worker={"kv_dtype": "fp32"}, per_rank=per_rank) as group:
        assert group.worker_address.startswith("127.0.0.2:")
        messages = group.generate(
            tokens=prompt["prompt_ids"], max_new_tokens=16, ignore_eos=True, policy={"policy": "full"}
        )
    assert token_ids(messages) == prompt["ids"][:16]
