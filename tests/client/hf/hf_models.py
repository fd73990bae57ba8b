"""Tiny models with random weights, one of each family that is served, and what tests ask of them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import numpy as np
import torch
import transformers
from heavywater.hf.rows import BatchRows
from policies import LayerCache, Policy, summarize_prompt

VOCAB = 101
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GQA = {"intermediate_size": 96, "num_key_value_heads": 2}
CONFIGS = {
    "llama": (transformers.LlamaConfig, GQA),
    "mistral": (transformers.MistralConfig, {**GQA, "sliding_window": None}),
    "qwen2": (transformers.Qwen2Config, GQA),
    "qwen3": (transformers.Qwen3Config, {**GQA, "head_dim": 16}),
    "gemma": (transformers.GemmaConfig, {**GQA, "num_key_value_heads": 1, "head_dim": 16}),
    "opt": (transformers.OPTConfig, {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "gpt_neox": (transformers.GPTNeoXConfig, {"intermediate_size": 96}),
}


def tiny(name: str, **changes: object) -> transformers.PreTrainedModel:
    """Weights large enough that greedy tokens and attention differ from one position to the next."""
    config_class, own = CONFIGS[name]
    config = config_class(**{**COMMON, **own, "initializer_range": 0.2, **changes})
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def prompt(tokens: int, rows: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCAB, (rows, tokens))


def left_padded(prompts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """[tokens] each: what a tokenizer makes of them with padding_side="left"."""
    longest = max(len(ids) for ids in prompts)
    ids = torch.stack([torch.nn.functional.pad(ids, (longest - len(ids), 0)) for ids in prompts])
    mask = torch.stack([(torch.arange(longest) >= longest - len(ids)).long() for ids in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def greedy(model: transformers.PreTrainedModel, inputs: torch.Tensor | dict[str, torch.Tensor], tokens: int, **kwargs):
    """The new tokens, [rows][tokens]."""
    if isinstance(inputs, torch.Tensor):  # all of them tokens, also where one is what pads elsewhere
        inputs = {"input_ids": inputs, "attention_mask": torch.ones_like(inputs)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # past_key_values is named cache from 6.0 on
        out = model.generate(**{**inputs, **kwargs}, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
    return out[:, inputs["input_ids"].shape[1] :]


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple]]:
    """(layer, q, k, v, out, scale) of every attention, [B][heads][T][size]; out [B][T][heads][size]."""
    calls: list[tuple] = []
    attend = BatchRows.attend

    def recording(self, layer, queries, keys, values, padding, scale):
        out = attend(self, layer, queries, keys, values, padding, scale)
        calls.append((layer, queries.clone(), keys.clone(), values.clone(), out.clone(), scale))
        return out

    BatchRows.attend = recording
    try:
        yield calls
    finally:
        BatchRows.attend = attend


def reference(calls: list[tuple], layer: int, policy: Policy) -> tuple[LayerCache, float]:
    """The plain reference on what was recorded of one row: its cache, and how far the outputs are from its own."""
    steps = [call[1:] for call in calls if call[0] == layer]
    rows = [[states[0].transpose(0, 1).double().numpy().astype(np.float32) for states in step[:3]] for step in steps]
    size = rows[0][0].shape[-1]
    for step, row in zip(steps, rows, strict=True):
        row[0] = row[0] * np.float32(step[4] * np.sqrt(size))  # the reference divides by the root of the head size
    cache = LayerCache(policy, summarize_prompt(*rows[0], policy.window))
    worst = 0.0
    for step, (q, k, v) in zip(steps[1:], rows[1:], strict=True):
        want = cache.append(q[0], k[0], v[0])
        worst = max(worst, float(np.abs(want - step[3][0, 0].float().numpy()).max()))
    return cache, worst
