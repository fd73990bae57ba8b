"""What `generate` asks of a cache: chunks, padding, turns, refusals, bytes that are really freed."""

import copy
import gc
import weakref

import heavywater.hf
import pytest
import torch
import transformers
from heavywater.hf.policy import policy_options
from hf_models import greedy, left_padded, prompt, tiny
from process_memory import measure, wide

PROMPT, NEW = 70, 16
BUDGET = {"heavy_tokens": 12, "recent_tokens": 8, "window": 10}


def sets(cache, row=0):
    return [kept.positions.tolist() for kept in cache.kept(row)]


@pytest.mark.parametrize("policy", ["full", "h2o", "snapkv_h2o"])
def test_a_prompt_in_chunks_is_one_prompt(policy):
    model, ids = tiny("llama"), prompt(PROMPT)
    budget = {} if policy == "full" else BUDGET
    whole = heavywater.hf.attach(model, policy=policy, **budget)
    want = greedy(model, ids, NEW, cache=whole)
    chunked = heavywater.hf.attach(model, policy=policy, **budget)
    assert torch.equal(greedy(model, ids, NEW, cache=chunked, prefill_chunk_size=16), want)
    assert sets(chunked) == sets(whole)


def test_ratios_are_of_the_whole_prompt_although_it_comes_in_chunks():
    model = tiny("llama")
    cache = heavywater.hf.attach(model, policy="h2o", heavy_ratio=0.2, recent_ratio=0.1)
    greedy(model, prompt(PROMPT), NEW, cache=cache, prefill_chunk_size=16)
    assert cache.stats().tokens_resident == 14 + 7


def test_padding_gathers_no_score_and_takes_no_slot():
    model = tiny("llama")
    prompts = [prompt(tokens)[0] for tokens in (PROMPT, 41)]
    batch = heavywater.hf.attach(model, policy="h2o", **BUDGET)
    got = greedy(model, left_padded(prompts), NEW, cache=batch)
    for row, ids in enumerate(prompts):
        alone = heavywater.hf.attach(model, policy="h2o", **BUDGET)
        want = greedy(model, ids[None], NEW, cache=alone)
        assert torch.equal(got[row : row + 1], want)
        assert sets(batch, row) == sets(alone)


def test_padding_longer_than_a_chunk():
    model = tiny("llama")
    prompts = [prompt(tokens)[0] for tokens in (PROMPT, 20)]
    whole, chunked = (heavywater.hf.attach(model, policy="h2o", **BUDGET) for _ in range(2))
    want = greedy(model, left_padded(prompts), NEW, cache=whole)
    assert torch.equal(greedy(model, left_padded(prompts), NEW, cache=chunked, prefill_chunk_size=16), want)
    assert sets(chunked, 1) == sets(whole, 1)


@pytest.mark.parametrize("chunk", [None, 7])
def test_several_turns_go_on_from_the_cache(chunk):
    model = tiny("llama")
    own = transformers.DynamicCache(config=model.config)
    cache = heavywater.hf.attach(model, policy="full")
    ids = prompt(PROMPT)
    for turn in range(3):
        want = greedy(model, ids, NEW, cache=own, prefill_chunk_size=chunk)
        assert torch.equal(greedy(model, ids, NEW, cache=cache, prefill_chunk_size=chunk), want), f"turn {turn}"
        ids = torch.cat([ids, want, prompt(13)], dim=1)
    assert cache.get_seq_length() == own.get_seq_length()


def test_tokens_seen_and_residents_are_counted_apart():
    model = tiny("llama")
    cache = heavywater.hf.attach(model, policy="h2o", **BUDGET)
    assert (cache.get_seq_length(), cache.get_mask_sizes(5, 0)) == (0, (5, 0))
    greedy(model, prompt(PROMPT), NEW, cache=cache)
    seen = PROMPT + NEW - 1
    assert cache.get_seq_length() == seen
    assert cache.get_mask_sizes(1, 0) == (21, seen - 20)
    stats = cache.stats()
    assert (stats.tokens_seen, stats.tokens_resident, stats.tokens_dropped) == (seen, 20, seen - 20)


def test_recall_of_everything_is_the_full_cache_and_host_memory_holds_what_left():
    model, ids = tiny("llama"), prompt(PROMPT)
    want = greedy(model, ids, NEW)
    cache = heavywater.hf.attach(model, policy="h2o", recall="all", page_tokens=32, **BUDGET)
    assert torch.equal(greedy(model, ids, NEW, cache=cache), want)
    stats = cache.stats()
    assert stats.tokens_demoted == PROMPT + NEW - 1 - stats.tokens_resident > 0
    assert stats.host_bytes > 0


def test_reset_and_cropping_everything_free_all_and_begin_anew():
    model, ids = tiny("llama"), prompt(PROMPT)
    cache = heavywater.hf.attach(model, policy="snapkv_h2o", recall=True, **BUDGET)
    want = greedy(model, ids, NEW, cache=cache)
    for forget in (cache.reset, lambda: cache.crop(-cache.get_seq_length())):
        cache.crop(0)
        forget()
        assert (cache.get_seq_length(), cache.stats().kv_bytes, cache.stats().host_bytes) == (0, 0, 0)
        assert torch.equal(greedy(model, ids, NEW, cache=cache), want)


def test_another_batch_is_refused():
    model = tiny("llama")
    cache = heavywater.hf.attach(model, policy="h2o", **BUDGET)
    greedy(model, prompt(PROMPT, rows=2), NEW, cache=cache)
    with pytest.raises(ValueError, match=r"cache holds 2; call cache\.reset"):
        greedy(model, prompt(PROMPT), NEW, cache=cache, attention_mask=torch.ones(1, 2 * PROMPT + NEW - 1))


def test_arguments_are_refused_by_name():
    model = tiny("llama")
    with pytest.raises(TypeError, match="unknown option 'sinks', want one of: scope, head_budgets"):
        heavywater.hf.attach(model, sinks=4)
    with pytest.raises(heavywater.HeavywaterError, match="want one of: full"):
        heavywater.hf.attach(model, policy="nonesuch")
    with pytest.raises(ValueError, match="recall is 'some'"):
        heavywater.hf.attach(model, recall="some")


def test_masks_that_cannot_be_served_are_refused():
    model, ids = tiny("llama"), prompt(10)
    cache = heavywater.hf.attach(model, policy="full")
    with pytest.raises(ValueError, match="attention_mask is Tensor, want"), torch.no_grad():
        model(ids, cache=cache, attention_mask=torch.zeros(1, 1, 10, 10))
    cache.reset()
    with torch.no_grad():
        model(ids, cache=cache)
        with pytest.raises(ValueError, match="has 8 of the 10 earlier columns"):
            model(prompt(1), cache=cache, attention_mask=torch.tensor([[0, 0] + 9 * [1]]))


def test_a_cache_whose_step_has_failed_says_so_until_it_is_reset():
    model = tiny("llama")
    cache = heavywater.hf.attach(model, policy="full", max_tokens=20)
    with pytest.raises(heavywater.HeavywaterError, match="max_tokens"):
        greedy(model, prompt(19), NEW, cache=cache)
    with pytest.raises(RuntimeError, match=r"cannot go on after a failed step .*max_tokens.*reset"):
        greedy(model, prompt(5), 3, cache=cache)
    cache.reset()
    assert greedy(model, prompt(5), 3, cache=cache).shape == (1, 3)


def test_a_prompt_that_is_refused_leaves_a_cache_that_can_be_reset():
    model = tiny("llama")
    cache = heavywater.hf.attach(model, policy="full", max_tokens=20)
    with pytest.raises(heavywater.HeavywaterError, match="max_tokens"):
        greedy(model, prompt(30, 2), 1, cache=cache)
    cache.reset()
    assert greedy(model, prompt(5), 3, cache=cache).shape == (1, 3)


def test_a_cache_goes_with_its_last_reference():
    model = tiny("llama")
    cache = heavywater.hf.attach(model, policy="h2o")
    greedy(model, prompt(20), 3, cache=cache)
    device = weakref.ref(cache.rows)
    gc.disable()  # what is no cycle needs no collector
    try:
        del cache
        assert device() is None
    finally:
        gc.enable()


def test_a_ratio_ends_the_share_of_the_device():
    options = policy_options("recall", recent_ratio=0.1)
    assert (options.device_ratio, options.recent_tokens, options.recent_ratio) == (0.0, 0, 0.1)


def test_more_tokens_than_a_sliding_window_are_refused():
    model = tiny("mistral", sliding_window=32)
    with pytest.raises(ValueError, match="max_tokens is 33, want at most 32, the model's sliding_window"):
        heavywater.hf.attach(model, max_tokens=33)


def test_training_is_refused():
    model = tiny("llama").train()
    cache = heavywater.hf.attach(model, policy="full")
    for error in (ValueError, RuntimeError):  # what was refused, and that the cache has to be reset
        with pytest.raises(error, match=r"call model.eval\(\)"):
            model(prompt(5), cache=cache)
    cache.reset()
    assert greedy(model.eval(), prompt(5), 3, cache=cache).shape == (1, 3)


def test_a_copy_of_a_model_generates_itself():
    model = tiny("llama")
    heavywater.hf.attach(model)
    twin = copy.deepcopy(model)
    twin.lm_head.weight.data.neg_()
    ids = prompt(20)
    assert not torch.equal(greedy(twin, ids, 8), greedy(model, ids, 8))


def test_a_model_whose_attention_was_set_back_does_not_go_on_silently():
    model = tiny("llama")
    cache = heavywater.hf.attach(model, policy="full")
    model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match="did not come to this cache"):
        greedy(model, prompt(PROMPT), NEW, cache=cache)


def test_the_process_holds_less_memory_and_not_a_mask():
    model = wide(layers=8, context=4096)
    grown = {}
    for policy in ("h2o", "full"):
        measured = measure(model, 1500, lambda policy=policy: heavywater.hf.attach(model, policy=policy))
        grown[policy] = measured.grown_kib
        assert abs(grown[policy] - measured.kv_kib) < 30_000, (policy, measured)
    row_kib = 2 * 8 * 128 * 4 // 1024
    assert grown["full"] > 0.8 * 8 * 1500 * row_kib
    assert grown["full"] - grown["h2o"] > 0.6 * 8 * 1500 * row_kib
