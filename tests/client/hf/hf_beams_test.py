"""Rows that are reordered, repeated and selected: beam search, and what a cache of several rows is asked for."""

import heavywater.hf
import pytest
import torch
import transformers
from hf_models import CONFIGS, greedy, left_padded, prompt, tiny

PROMPT, NEW = 70, 20
BUDGET = {"heavy_tokens": 12, "recent_tokens": 8, "window": 10}
POLICIES = {
    "full": {"policy": "full"},
    "h2o": {"policy": "h2o", **BUDGET},
    "between plans": {"policy": "snapkv_h2o", "plan_interval_steps": 7, "min_budget_tokens": 1, **BUDGET},
    "recall": {"policy": "snapkv_h2o", "recall": True, "min_budget_tokens": 1, "page_tokens": 32, **BUDGET},
    "scissorhands": {"policy": "scissorhands", "min_budget_tokens": 1, **BUDGET},
}


@pytest.fixture(params=POLICIES)
def options(request):
    return POLICIES[request.param]


def step(model, cache, tokens):
    """The logits of one token for each row, all columns attended."""
    mask = torch.ones(tokens.shape[0], cache.get_seq_length() + tokens.shape[1])
    with torch.no_grad():
        return model(tokens, cache=cache, attention_mask=mask).logits[:, -1]


def beams(model, inputs, **kwargs):
    return greedy(model, inputs, NEW, num_beams=4, num_return_sequences=2, **kwargs)


@pytest.mark.parametrize("name", CONFIGS)
def test_beam_search_is_transformers_own_with_policy_full(name):
    model, ids = tiny(name), prompt(PROMPT)
    want = beams(model, ids)
    cache = heavywater.hf.attach(model, policy="full")
    assert torch.equal(beams(model, ids, cache=cache), want)
    assert len({tuple(row) for row in want.tolist()}) == 2


def test_beam_search_of_a_padded_batch():
    model = tiny("llama")
    inputs = left_padded([prompt(tokens)[0] for tokens in (PROMPT, 31)])
    want = beams(model, inputs)
    assert torch.equal(beams(model, inputs, cache=heavywater.hf.attach(model, policy="full")), want)


def test_beam_search_with_recall_of_everything_is_transformers_own():
    model, ids = tiny("llama"), prompt(PROMPT)
    cache = heavywater.hf.attach(model, policy="h2o", recall="all", page_tokens=32, **BUDGET)
    assert torch.equal(beams(model, ids, cache=cache), beams(model, ids))
    assert cache.stats().tokens_demoted > 0


def test_beams_of_a_cache_that_forgets_are_the_rows_that_they_come_from(options):
    """Each beam is what one row would be that had taken in the beam's tokens."""
    model, ids = tiny("llama"), prompt(PROMPT)
    cache = heavywater.hf.attach(model, **options)
    out = greedy(model, ids, NEW, num_beams=4, num_return_sequences=4, cache=cache)
    seen = out[:, :-1]
    # The rows lie in the order of the last reorder: found by what they keep.
    kept = {tuple(tuple(layer.positions.tolist()) for layer in cache.kept(row)) for row in range(4)}
    alone = heavywater.hf.attach(model, **options)
    step(model, alone, ids)
    for token in seen[0]:
        step(model, alone, token.view(1, 1))
    assert tuple(tuple(layer.positions.tolist()) for layer in alone.kept()) in kept


def test_rows_go_on_from_where_they_are_put(options):
    model, ids = tiny("llama"), prompt(PROMPT, rows=2)
    tokens = prompt(12, rows=6)
    cache, alone = (heavywater.hf.attach(model, **options) for _ in range(2))
    for one in (cache, alone):
        step(model, one, ids)
        for column in range(3):
            step(model, one, tokens[:2, column : column + 1])
    cache.batch_repeat_interleave(3)  # 0 0 0 1 1 1
    cache.reorder_cache(torch.tensor([3, 0, 0, 1, 5, 4]))  # 1 0 0 0 1 1
    cache.batch_select_indices(torch.tensor([2, 0]))  # 0 1
    cache.batch_select_indices(torch.tensor([True, True]))
    for column in range(3, 12):
        got = step(model, cache, tokens[:2, column : column + 1])
        assert torch.equal(got, step(model, alone, tokens[:2, column : column + 1]))
    for row in range(2):
        for mine, own in zip(cache.kept(row), alone.kept(row), strict=True):
            assert mine.positions.tolist() == own.positions.tolist()
            assert mine.scores.tolist() == own.scores.tolist()


def test_copies_go_different_ways(options):
    model, ids = tiny("llama"), prompt(PROMPT)
    tokens = prompt(14, rows=2)
    cache = heavywater.hf.attach(model, **options)
    step(model, cache, ids)
    cache.batch_repeat_interleave(2)
    both = [step(model, cache, tokens[:, column : column + 1]) for column in range(14)]
    for row in range(2):
        alone = heavywater.hf.attach(model, **options)
        step(model, alone, ids)
        for column in range(14):
            want = step(model, alone, tokens[row : row + 1, column : column + 1])
            assert torch.allclose(both[column][row], want[0], atol=1e-5)


def test_a_turn_of_beams_after_a_turn_of_one():
    model, ids = tiny("llama"), prompt(PROMPT)
    own = transformers.DynamicCache(config=model.config)
    cache = heavywater.hf.attach(model, policy="full")
    results = []
    for one in (own, cache):
        answer = greedy(model, ids, NEW, cache=one)
        torch.manual_seed(3)
        ids2 = torch.cat([ids, answer, prompt(9)], dim=1)
        one.batch_repeat_interleave(4)
        results.append(beams(model, ids2, cache=one))
    assert torch.equal(*results)


def test_rows_that_have_gone_free_their_memory():
    model = tiny("llama")
    cache = heavywater.hf.attach(model, policy="snapkv_h2o", recall=True, min_budget_tokens=1, **BUDGET)
    step(model, cache, prompt(PROMPT))
    one = cache.stats()
    cache.batch_repeat_interleave(4)
    four = cache.stats()
    assert (four.kv_bytes, four.host_bytes) == (4 * one.kv_bytes, 4 * one.host_bytes)
    cache.batch_select_indices(torch.tensor([2]))
    back = cache.stats()
    assert (back.kv_bytes, back.host_bytes) == (one.kv_bytes, one.host_bytes)


def test_what_cannot_be_selected_is_refused_and_changes_nothing():
    model, ids = tiny("llama"), prompt(PROMPT)
    cache = heavywater.hf.attach(model, policy="h2o", **BUDGET)
    cache.reorder_cache(torch.tensor([0, 1]))  # an empty cache has no rows yet
    step(model, cache, ids)
    with pytest.raises(IndexError, match="row 1 is selected, want 0 to 0"):
        cache.reorder_cache(torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="repeats is 0"):
        cache.batch_repeat_interleave(0)
    chunked = heavywater.hf.attach(model, policy="h2o", **BUDGET)
    chunked.expect_prompt(PROMPT)
    step(model, chunked, ids[:, :20])
    with pytest.raises(NotImplementedError, match="before all of a prompt has come"):
        chunked.batch_repeat_interleave(2)
    step(model, chunked, ids[:, 20:])
    assert torch.equal(step(model, chunked, ids[:, :1]), step(model, cache, ids[:, :1]))
