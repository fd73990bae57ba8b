"""Every family that is served: the full cache's tokens, and the reference's kept sets."""

import heavywater.hf
import pytest
import torch
import transformers
from hf_models import CONFIGS, greedy, left_padded, prompt, recorded, reference, tiny
from policies import Policy

PROMPT, NEW = 70, 24


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("argument", ["cache", "past_key_values"])
def test_policy_full_gives_the_greedy_tokens_of_transformers_own_cache(name, argument):
    model, ids = tiny(name), prompt(PROMPT)
    want = greedy(model, ids, NEW)
    cache = heavywater.hf.attach(model, policy="full")
    assert torch.equal(greedy(model, ids, NEW, **{argument: cache}), want)
    assert len(set(want[0].tolist())) > 3  # else any cache would do
    assert cache.stats().tokens_resident == cache.get_seq_length() == PROMPT + NEW - 1


@pytest.mark.parametrize("name", CONFIGS)
def test_a_batch_with_left_padding_gives_each_rows_own_tokens(name):
    model = tiny(name)
    prompts = [prompt(tokens)[0] for tokens in (PROMPT, 33, 1)]
    cache = heavywater.hf.attach(model, policy="full")
    got = greedy(model, left_padded(prompts), NEW, cache=cache)
    assert cache.stats().tokens_seen == PROMPT + 33 + 1 + 3 * (NEW - 1)
    for row, ids in enumerate(prompts):
        assert torch.equal(got[row : row + 1], greedy(model, ids[None], NEW)), f"row {row}"


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("policy", ["h2o", "snapkv_h2o"])
def test_kept_sets_and_outputs_are_the_plain_references(name, policy):
    model = tiny(name)
    cache = heavywater.hf.attach(model, policy=policy, heavy_tokens=12, recent_tokens=8, window=10)
    with recorded() as calls:
        greedy(model, prompt(PROMPT), NEW, cache=cache)
    for layer in range(model.config.num_hidden_layers):
        wanted, worst = reference(calls, layer, Policy(policy, budget_tokens=20, recent_tokens=8, window=10))
        assert cache.kept()[layer].positions.tolist() == wanted.kept()[0].tolist()
        assert worst < 1e-4
    assert cache.stats().tokens_resident == 20


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2), "GPT2LMHeadModel .model_type 'gpt2'. is not served"),
        (transformers.BloomConfig(hidden_size=32, n_layer=1, n_head=2), "BloomForCausalLM"),
        (transformers.T5Config(d_model=32, num_layers=1, d_kv=8, num_heads=2, d_ff=32), "T5"),
        (transformers.Gemma2Config(num_hidden_layers=1, hidden_size=32, intermediate_size=32), "Gemma2ForCausalLM"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_by_name(config, words):
    auto = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    config.vocab_size = 50
    with pytest.raises(heavywater.hf.UnsupportedModelError, match=words):
        heavywater.hf.attach(auto.from_config(config))


def test_a_sliding_window_bounds_the_tokens():
    model = tiny("mistral", sliding_window=40)
    cache = heavywater.hf.attach(model, policy="full")
    want = greedy(model, prompt(30), 9)
    torch.manual_seed(7)
    assert cache.get_max_length() == 40
    with pytest.raises(heavywater.HeavywaterError, match="40"):
        greedy(model, prompt(30), 20, cache=cache)
    assert want.shape == (1, 9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_kept_in_sixteen_bits(dtype):
    model = tiny("llama").to(dtype)
    cache = heavywater.hf.attach(model, policy="full")
    with recorded() as calls, torch.no_grad():
        model(prompt(PROMPT), cache=cache)
        model(prompt(1), cache=cache)
    assert calls[0][4].dtype == dtype
    half = cache.stats().kv_bytes
    other = heavywater.hf.attach(model, policy="full", kv_dtype="fp32")
    with torch.no_grad():
        model(prompt(PROMPT), cache=other)
        model(prompt(1), cache=other)
    assert half < 0.7 * other.stats().kv_bytes
    _, worst = reference(calls, 2, Policy("full"))
    assert worst < 0.05
