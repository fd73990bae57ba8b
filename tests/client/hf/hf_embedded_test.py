"""The embedded model (GGUF) through Transformers: the expected tokens, and the reference's kept sets."""

import json
from pathlib import Path

import heavywater.hf
import pytest
import torch
from hf_models import greedy, recorded, reference
from policies import Policy

CASES = json.loads((Path(__file__).resolve().parents[2] / "reference" / "expected_ids.json").read_text())["cases"]


@pytest.fixture
def model(embedded, monkeypatch):
    monkeypatch.setattr(embedded[0].generation_config, "eos_token_id", None)  # expected ids go on
    return embedded[0]


@pytest.mark.parametrize(
    "case", [case for case in CASES if len(case["prompt_ids"]) < 700], ids=lambda case: case["name"]
)
def test_policy_full_gives_the_expected_tokens(model, case):
    cache = heavywater.hf.attach(model, policy="full")
    ids = torch.tensor([case["prompt_ids"]])
    new = 24
    assert greedy(model, ids, new, cache=cache)[0].tolist() == case["ids"][:new]


def test_snapkv_h2o_keeps_the_references_sets(model):
    ids = torch.tensor([max((case["prompt_ids"] for case in CASES), key=len)[:400]])
    cache = heavywater.hf.attach(model, policy="snapkv_h2o", heavy_ratio=0.1, recent_ratio=0.1, min_budget_tokens=1)
    with recorded() as calls:
        greedy(model, ids, 16, cache=cache)
    for layer in (0, 1, 14, 29):
        wanted, worst = reference(calls, layer, Policy("snapkv_h2o", budget_tokens=80, recent_tokens=40))
        assert cache.kept()[layer].positions.tolist() == wanted.kept()[0].tolist()
        assert worst < 1e-4
    full = 2 * 30 * 3 * 64 * 4 * 415
    assert cache.stats().kv_bytes < 0.25 * full
