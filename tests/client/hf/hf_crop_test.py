"""`crop`: the cache goes back to what it was, exactly, whatever its policy has forgotten since."""

import heavywater.hf
import numpy as np
import pytest
import torch
import transformers
from hf_beams_test import POLICIES, step
from hf_models import greedy, left_padded, prompt, tiny

PROMPT, NEW = 70, 20


@pytest.fixture(params=POLICIES)
def options(request):
    return POLICIES[request.param]


def same(cache, other, rtol=0.0):
    for mine, own in zip(cache.kept(), other.kept(), strict=True):
        assert mine.positions.tolist() == own.positions.tolist()
        assert np.allclose(mine.scores, own.scores, rtol=rtol, atol=rtol * 2**32)
    assert cache.get_seq_length() == other.get_seq_length()


@pytest.mark.parametrize("back", [1, 5, 12])
def test_what_was_taken_back_never_came(options, back):
    model, ids, tokens = tiny("llama"), prompt(PROMPT), prompt(60)
    cache = heavywater.hf.attach(model, crop_tokens=12, **options)
    never = heavywater.hf.attach(model, **options)
    for one in (cache, never):
        step(model, one, ids)
        for column in range(20):
            step(model, one, tokens[:, column : column + 1])
    for column in range(back):
        step(model, cache, tokens[:, 40 + column : 41 + column])
    cache.crop(-back)
    same(cache, never)
    for column in range(20, 40):
        got = step(model, cache, tokens[:, column : column + 1])
        assert torch.equal(got, step(model, never, tokens[:, column : column + 1]))
    same(cache, never)


def test_again_and_again_and_a_part_of_a_longer_step(options):
    model, ids, tokens = tiny("llama"), prompt(PROMPT), prompt(80)
    cache = heavywater.hf.attach(model, crop_tokens=0, **options)
    never = heavywater.hf.attach(model, **options)
    for one in (cache, never):
        step(model, one, ids)
    for turn, stay in enumerate((3, 6, 1, 2, 5, 4)):
        first = 10 * turn
        step(model, cache, tokens[:, first : first + 6])
        cache.crop(stay - 6)
        step(model, never, tokens[:, first : first + stay])
        same(cache, never, rtol=1e-4)  # the model rounds Q, K and V of six tokens otherwise than of three


def test_turns_are_taken_back(options):
    """The second question is asked in another way."""
    model, ids = tiny("llama"), prompt(PROMPT)
    cache = heavywater.hf.attach(model, crop_tokens=NEW + 20, **options)
    never = heavywater.hf.attach(model, **options)
    first = torch.cat([ids, greedy(model, ids, NEW, cache=cache), prompt(12)], dim=1)
    assert torch.equal(greedy(model, ids, NEW, cache=never), first[:, PROMPT:-12])
    seen = cache.get_seq_length()
    greedy(model, first, NEW, cache=cache)
    cache.crop(seen - cache.get_seq_length())
    same(cache, never)
    other = torch.cat([first[:, :-12], prompt(15)], dim=1)
    assert torch.equal(greedy(model, other, NEW, cache=cache), greedy(model, other, NEW, cache=never))
    same(cache, never)


@pytest.mark.parametrize("back", [5, 40, 75, 80])
def test_a_full_cache_is_transformers_own_however_far_it_goes_back(back):
    model, ids = tiny("llama"), prompt(PROMPT)
    own = transformers.DynamicCache(config=model.config)
    cache = heavywater.hf.attach(model, policy="full")
    first = greedy(model, ids, NEW, cache=own)
    assert torch.equal(greedy(model, ids, NEW, cache=cache), first)
    seen = own.get_seq_length()
    whole = torch.cat([torch.cat([ids, first], dim=1)[:, : seen - back], prompt(11)], dim=1)
    for one in (own, cache):
        one.crop(-back)
        assert one.get_seq_length() == seen - back
    assert torch.equal(greedy(model, whole, NEW, cache=cache), greedy(model, whole, NEW, cache=own))


def test_rows_of_a_padded_batch_go_back_by_their_own_tokens(options):
    model = tiny("llama")
    prompts = [prompt(tokens)[0] for tokens in (PROMPT, 41)]
    tokens = prompt(20, rows=2)
    batch = heavywater.hf.attach(model, crop_tokens=8, **options)
    inputs = left_padded(prompts)
    mask = inputs["attention_mask"]
    with torch.no_grad():
        model(inputs["input_ids"], cache=batch, attention_mask=mask)
        for column in range(9):
            mask = torch.cat([mask, torch.ones(2, 1)], dim=1)
            model(tokens[:, column : column + 1], cache=batch, attention_mask=mask)
    batch.crop(-6)
    for row, ids in enumerate(prompts):
        alone = heavywater.hf.attach(model, **options)
        step(model, alone, ids[None])
        for column in range(3):
            step(model, alone, tokens[row : row + 1, column : column + 1])
        for mine, own in zip(batch.kept(row), alone.kept(), strict=True):
            assert mine.positions.tolist() == own.positions.tolist()


def test_assisted_decoding_gives_transformers_own_tokens_with_policy_full():
    model, ids = tiny("llama"), prompt(12).repeat(1, 6)
    want = greedy(model, ids, NEW)
    for assistant in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": tiny("llama")}):
        cache = heavywater.hf.attach(model, policy="full")
        assert torch.equal(greedy(model, ids, NEW, cache=cache, **assistant), want)


ASSISTANTS = {
    "prompt lookup": lambda: {"prompt_lookup_num_tokens": 4},
    "another model": lambda: {"assistant_model": tiny("llama")},
}


@pytest.mark.parametrize("assistant", ASSISTANTS)
def test_assisted_decoding_compresses_the_prompt_alone_and_takes_wrong_candidates_back(options, assistant, monkeypatch):
    """As a loop that feeds the accepted tokens, step by step, to a cache that never saw another."""
    model, ids = tiny("llama"), prompt(12).repeat(1, 6)
    cache = heavywater.hf.attach(model, **options)
    steps = accepted(cache, monkeypatch)
    got = greedy(model, ids, NEW, cache=cache, **ASSISTANTS[assistant]())
    assert len(steps) > 1
    never = heavywater.hf.attach(model, **options)
    step(model, never, ids)
    seen = ids.shape[1]
    whole = torch.cat([ids, got], dim=1)
    for tokens in steps:
        if tokens > 0:
            step(model, never, whole[:, seen : seen + tokens])
        seen += tokens
    assert seen == cache.get_seq_length() >= ids.shape[1] + NEW - 1
    same(cache, never, rtol=1e-4)


def accepted(cache, monkeypatch):
    """The tokens that stay of each forward pass after the prompt; the list fills as they come."""
    steps, crop = [], cache.crop
    columns = [0]

    def cropping(count):
        before = cache.get_seq_length()
        crop(count)
        if not steps:
            columns[0] = cache.rows.prompt_columns
        steps.append(cache.get_seq_length() - columns[0])
        columns[0] = cache.get_seq_length()
        assert before + count == columns[0]

    monkeypatch.setattr(cache, "crop", cropping)
    return steps


def test_assisted_decoding_with_recall_of_everything_gives_transformers_own_tokens():
    model, ids = tiny("llama"), prompt(12).repeat(1, 6)
    want = greedy(model, ids, NEW)
    for assistant in ASSISTANTS.values():
        cache = heavywater.hf.attach(model, policy="h2o", heavy_tokens=12, recent_tokens=8, recall="all")
        assert torch.equal(greedy(model, ids, NEW, cache=cache, **assistant()), want)
        assert cache.stats().tokens_demoted > 40


@pytest.mark.parametrize("policy", [{"policy": "full"}, {"policy": "h2o", "heavy_tokens": 12, "recall": "all"}])
def test_a_further_turn_is_assisted_too(policy):
    model, ids = tiny("llama"), prompt(12).repeat(1, 4)
    cache = heavywater.hf.attach(model, **policy)
    for _ in range(3):
        got = greedy(model, ids, NEW, cache=cache, prompt_lookup_num_tokens=4)
        assert torch.equal(got, greedy(model, ids, NEW))
        assert cache.get_seq_length() == ids.shape[1] + NEW - 1
        ids = torch.cat([ids, got, prompt(5), ids[:, -24:]], dim=1)


def test_assisted_decoding_without_a_candidate_is_ordinary_decoding(options):
    model, ids = tiny("llama"), torch.arange(3, 3 + PROMPT)[None]  # nothing comes twice
    want, got = (heavywater.hf.attach(model, **options) for _ in range(2))
    assert torch.equal(
        greedy(model, ids, 2, cache=got, prompt_lookup_num_tokens=4), greedy(model, ids, 2, cache=want)
    )
    same(got, want)


def test_what_lies_too_far_back_is_refused_by_name_and_changes_nothing(options):
    if options["policy"] == "full":
        return
    model, ids, tokens = tiny("llama"), prompt(PROMPT), prompt(40)
    cache = heavywater.hf.attach(model, **options)
    assert not cache.is_croppable
    step(model, cache, ids)
    step(model, cache, tokens[:, :3])
    with pytest.raises(NotImplementedError, match=r"crop\(-2\).*can take 0; want .*crop_tokens of attach"):
        cache.crop(-2)
    with pytest.raises(ValueError, match=r"crop\(2\): want a negative number"):
        cache.crop(2)
    recording = heavywater.hf.attach(model, crop_tokens=4, **options)
    assert recording.is_croppable
    step(model, recording, ids)
    for column in range(20):
        step(model, recording, tokens[:, column : column + 1])
    with pytest.raises(NotImplementedError, match=r"crop\(-21\).* would take 21 tokens .* can take [4-8];"):
        recording.crop(-21)
    recording.crop(-4)
    recording.crop(-recording.get_seq_length())
    assert recording.stats().kv_bytes == 0
    with pytest.raises(ValueError, match="crop_tokens is -1"):
        heavywater.hf.attach(model, crop_tokens=-1, **options)


def test_copies_are_bounded():
    """Three copies of the bounded cache, however long the sequence grows."""
    model = tiny("llama")
    sizes = []
    for crop_tokens in (None, 4):
        cache = heavywater.hf.attach(model, policy="h2o", heavy_tokens=12, recent_tokens=8, crop_tokens=crop_tokens)
        step(model, cache, prompt(PROMPT))
        most = 0
        for _ in range(40):
            step(model, cache, prompt(1))
            most = max(most, cache.stats().kv_bytes)
        sizes.append(most)
    assert sizes[0] < sizes[1] <= 4 * sizes[0]
