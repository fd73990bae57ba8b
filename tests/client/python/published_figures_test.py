"""`heavywater eval ppl` with its defaults gives the figures of an independent simulation of the design."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    not os.environ.get("HEAVYWATER_ALL"), reason="takes many minutes: deploy/local/test --all"
)

FULL_PPL = 30.04
# (policy, scope): perplexity by budget.
PPL = {
    ("streaming", "kv_head"): {0.1: 33.94, 0.2: 31.90, 0.4: 31.12},
    ("h2o", "kv_head"): {0.1: 34.05, 0.2: 31.81, 0.4: 30.56},
    ("snapkv_h2o", "kv_head"): {0.1: 32.78, 0.2: 31.44, 0.4: 30.67},
    ("h2o", "layer"): {0.2: 32.00},
    ("snapkv_h2o", "layer"): {0.2: 31.62},
}
# KL to the full cache in nats at 20 %, scope kv_head, to three digits.
KL = {"streaming": 0.087, "h2o": 0.062, "snapkv_h2o": 0.052}


@pytest.fixture(scope="module")
def rows() -> list[dict[str, object]]:
    command = [sys.executable, "-m", "heavywater", "eval", "ppl", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=3600, check=True)
    return json.loads(done.stdout)["rows"]


def test_every_perplexity_is_within_one_per_cent(rows: list[dict[str, object]]) -> None:
    assert len(rows) == 1 + sum(len(budgets) for budgets in PPL.values())
    for row in rows:
        want = FULL_PPL if row["policy"] == "full" else PPL[row["policy"], row["scope"]][row["budget"]]
        assert row["ppl"] == pytest.approx(want, rel=0.01), row


def test_the_divergence_from_the_full_cache_is_within_two_per_cent(rows: list[dict[str, object]]) -> None:
    found = {row["policy"]: row["kl"] for row in rows if (row["scope"], row["budget"]) == ("kv_head", 0.2)}
    assert found == pytest.approx(KL, rel=0.02)


def test_device_bytes_follow_the_budget(rows: list[dict[str, object]]) -> None:
    for row in rows:
        assert row["bytes_ratio"] < (row["budget"] or 1.0) * 1.3, row
