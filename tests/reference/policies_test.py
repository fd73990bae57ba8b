"""The reference itself, against dense recomputation and cases that can be worked out by hand."""

import numpy as np
import pytest
from llama_numpy import softmax
from policies import LayerCache, Policy, pooled, select_kept, summarize_prompt

KV_HEADS, GROUP, SIZE, PROMPT, STEPS = 2, 3, 8, 40, 50


def random_qkv(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    tokens = PROMPT + STEPS
    shapes = [(tokens, KV_HEADS * GROUP, SIZE), (tokens, KV_HEADS, SIZE), (tokens, KV_HEADS, SIZE)]
    return tuple(rng.standard_normal(shape, dtype=np.float32) for shape in shapes)


def run(policy: Policy, seed: int = 1) -> tuple[LayerCache, list[np.ndarray], list[list[np.ndarray]]]:
    """Prompt and decode; returns the cache, each step's output and what was kept before each step."""
    q, k, v = random_qkv(seed)
    cache = LayerCache(policy, summarize_prompt(q[:PROMPT], k[:PROMPT], v[:PROMPT], policy.window))
    outputs, kept = [], []
    for t in range(PROMPT, PROMPT + STEPS):
        kept.append(cache.kept())
        outputs.append(cache.append(q[t], k[t], v[t]))
    return cache, outputs, kept


@pytest.mark.parametrize("scope", ["layer", "kv_head"])
@pytest.mark.parametrize("name", ["full", "streaming", "h2o", "snapkv", "snapkv_h2o"])
def test_attention_equals_dense_attention_over_the_kept_positions(name, scope):
    q, k, v = random_qkv(1)
    _, outputs, kept = run(Policy(name, scope, budget_tokens=16, recent_tokens=8, window=4))
    for step, out in enumerate(outputs):
        t = PROMPT + step
        for head in range(KV_HEADS * GROUP):
            kv = head // GROUP
            resident = np.append(kept[step][kv], t)
            p = softmax(k[resident, kv] @ q[t, head] / np.float32(np.sqrt(SIZE)))
            np.testing.assert_allclose(out[head], p @ v[resident, kv], atol=1e-5)


@pytest.mark.parametrize("name", ["streaming", "h2o", "snapkv_h2o"])
@pytest.mark.parametrize("interval", [1, 7])
def test_the_budget_and_the_recent_positions_hold_after_every_plan(name, interval):
    policy = Policy(name, budget_tokens=16, recent_tokens=8, sink_tokens=2, window=4, plan_interval_steps=interval)
    _, _, kept = run(policy)
    for step in range(0, STEPS, interval):
        for positions in kept[step]:
            assert len(positions) == 16
            assert {0, 1} <= set(positions)
        if step >= policy.recent_tokens:
            assert set(range(PROMPT + step - 8, PROMPT + step)) <= set(kept[step][0])


def test_scope_layer_keeps_one_set_and_scope_kv_head_its_own():
    shared, _, _ = run(Policy("h2o", "layer", budget_tokens=16, recent_tokens=4))
    own, _, _ = run(Policy("h2o", "kv_head", budget_tokens=16, recent_tokens=4))
    assert np.array_equal(*shared.kept())
    assert not np.array_equal(*own.kept())


def test_streaming_keeps_sinks_and_the_newest():
    cache, _, _ = run(Policy("streaming", budget_tokens=16, sink_tokens=4))
    assert cache.kept()[0].tolist() == [0, 1, 2, 3, *range(PROMPT + STEPS - 12, PROMPT + STEPS)]


def test_scores_of_an_uncut_cache_are_the_column_sums_of_the_whole_text():
    q, k, v = random_qkv(1)
    cache, _, _ = run(Policy("h2o", "kv_head", budget_tokens=PROMPT + STEPS, recent_tokens=1))
    np.testing.assert_allclose(cache.scores(), summarize_prompt(q, k, v).column_sums, rtol=1e-5)


def test_equal_scores_keep_the_lower_positions():
    policy = Policy("h2o", budget_tokens=6, recent_tokens=2, sink_tokens=1)
    kept = select_kept(np.arange(10), np.zeros(10), policy, 10, policy.recent)
    assert kept.tolist() == [0, 1, 2, 3, 8, 9]


def test_average_pooling_counts_zeros_beyond_the_edges():
    assert pooled(np.array([5.0, 0, 0, 10.0]), "avg", 5).tolist() == [1.0, 3.0, 3.0, 2.0]
    assert pooled(np.array([5.0, 0, 0, 10.0]), "max", 3).tolist() == [5.0, 5.0, 10.0, 10.0]


def test_budgets_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="recent is 0"):
        Policy("h2o", budget_tokens=4)
    with pytest.raises(ValueError, match="want at least 2 sinks"):
        Policy("snapkv_h2o", budget_tokens=4, recent_tokens=3, sink_tokens=2)
