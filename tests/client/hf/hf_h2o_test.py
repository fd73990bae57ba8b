"""heavywater.hf.h2o_hf: the form of the paper's code, on checkpoints of this disk."""

import heavywater.hf
import heavywater.hf.h2o_hf as h2o_hf
import pytest
import torch
from hf_models import greedy, prompt, recorded, reference, tiny
from policies import Policy

CLASSES = {
    "llama": h2o_hf.H2OLlamaForCausalLM,
    "mistral": h2o_hf.H2OMistralForCausalLM,
    "qwen2": h2o_hf.H2OQwen2ForCausalLM,
    "qwen3": h2o_hf.H2OQwen3ForCausalLM,
    "gemma": h2o_hf.H2OGemmaForCausalLM,
    "opt": h2o_hf.H2OOPTForCausalLM,
    "gpt_neox": h2o_hf.H2OGPTNeoXForCausalLM,
}


@pytest.fixture
def checkpoint(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    return tmp_path


def test_the_documented_lines_run_as_written(checkpoint):
    NAME_OR_PATH = checkpoint
    inputs = {"input_ids": prompt(80)}
    from heavywater.hf.h2o_hf import H2OLlamaForCausalLM

    model = H2OLlamaForCausalLM.from_pretrained(NAME_OR_PATH, heavy_ratio=0.1, recent_ratio=0.1)
    out = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    assert out.shape == (1, 100)
    stats = model.last_cache.stats()
    assert (stats.tokens_seen, stats.tokens_resident, stats.tokens_dropped) == (99, 16, 83)


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_evicts_as_the_paper_says(name, tmp_path):
    tiny(name).save_pretrained(tmp_path)
    model = CLASSES[name].from_pretrained(tmp_path, heavy_ratio=0.1, recent_ratio=0.2)
    with recorded() as calls:
        greedy(model, prompt(60), 12)
    for layer, kept in enumerate(model.last_cache.kept()):
        wanted, _ = reference(calls, layer, Policy("h2o", budget_tokens=18, recent_tokens=12))
        assert kept.positions.tolist() == wanted.kept()[0].tolist()


def test_each_generate_begins_anew_and_a_given_cache_is_used(checkpoint):
    model = h2o_hf.H2OLlamaForCausalLM.from_pretrained(checkpoint)
    ids = prompt(60)
    first = greedy(model, ids, 12)
    assert torch.equal(greedy(model, ids, 12), first)
    own = heavywater.hf.attach(model, policy="full")
    assert torch.equal(greedy(model, ids, 12, cache=own), greedy(tiny_of(checkpoint), ids, 12))
    assert own.stats().tokens_resident == 71


def tiny_of(path):
    import transformers

    return transformers.LlamaForCausalLM.from_pretrained(path).eval()


def test_ratios_of_one_keep_everything(checkpoint):
    model = h2o_hf.H2OLlamaForCausalLM.from_pretrained(checkpoint, heavy_ratio=0.5, recent_ratio=0.5)
    ids = prompt(60)
    greedy(model, ids, 1)
    assert model.last_cache.stats().tokens_resident == 60


def test_other_arguments_of_from_pretrained_pass_through(checkpoint):
    model, info = h2o_hf.H2OLlamaForCausalLM.from_pretrained(
        checkpoint, heavy_ratio=0.1, recent_ratio=0.1, dtype=torch.bfloat16, output_loading_info=True
    )
    assert model.dtype == torch.bfloat16
    assert "missing_keys" in info
    assert greedy(model, prompt(40), 5).shape == (1, 5)
