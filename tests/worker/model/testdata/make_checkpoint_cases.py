"""Writes checkpoint_cases.json: tiny random checkpoints, and what Transformers computes with them.

    python make_checkpoint_cases.py checkpoint_cases.json

A case lists its tensors; value number i of all of them, in order, is offset + scale * (2 u - 1) with u =
UniformAt(seed, i) of worker/model/sampler.h, rounded to the case's type. So the test makes the same checkpoint
without a file of weights. Needs numpy, torch and transformers (recorded with 5.24.0 on the CPU in float32).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

_GAMMA = 0x9E3779B97F4A7C15
_VOCABULARY = 72
_PROMPT = 28
_RECORDED = 3  # last positions whose logits are kept
_NEW_TOKENS = 10

_COMMON = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# Name, config.json, type of the stored weights, files.
_CASES: list[tuple[str, dict[str, Any], str, int]] = [
    ("llama2", {"model_type": "llama", "num_key_value_heads": 6}, "F32", 1),
    (
        "llama3",
        {
            "model_type": "llama",
            "hidden_size": 96,
            "head_dim": 16,
            "rope_scaling": _LLAMA3,
        },
        "F32",
        1,
    ),
    ("linear", {"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "F32", 3),
    (
        "yarn",
        {
            "model_type": "llama",
            "hidden_size": 96,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        },
        "F32",
        1,
    ),
    ("mistral", {"model_type": "mistral", "sliding_window": 64}, "BF16", 2),
    (
        "qwen2",
        {"model_type": "qwen2", "tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": 8},
        "F32",
        1,
    ),
    ("qwen3", {"model_type": "qwen3", "head_dim": 20}, "F32", 1),
    (
        "qwen3_yarn",
        {
            "model_type": "qwen3",
            "head_dim": 16,
            "tie_word_embeddings": True,
            "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32},
        },
        "BF16",
        1,
    ),
]


def uniform(seed: int, count: int) -> np.ndarray:
    """Numbers 0 .. count - 1 of UniformAt(seed, ...)."""

    def mix(value: np.ndarray) -> np.ndarray:
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return value ^ (value >> np.uint64(31))

    with np.errstate(over="ignore"):
        start = mix(np.array([seed], np.uint64) + np.uint64(_GAMMA))
        bits = mix(start + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GAMMA))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def spread(name: str, hidden: int) -> tuple[float, float]:
    """Scale and offset of a tensor's values."""
    if "norm" in name:
        return 0.5, 1.0
    if name.endswith(".bias"):
        return 0.5, 0.0
    return (1.0 if "embed" in name or "lm_head" in name else round(2.0 / hidden**0.5, 4)), 0.0


def make_case(index: int, name: str, changes: dict[str, Any], dtype: str, files: int) -> dict[str, Any]:
    config = _COMMON | changes
    seed = 100 + index
    settings = {key: value for key, value in config.items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **settings)).float().eval()
    names = [key for key in model.state_dict() if not (config["tie_word_embeddings"] and key == "lm_head.weight")]
    tensors = [[key, list(model.state_dict()[key].shape), *spread(key, config["hidden_size"])] for key in names]
    drawn = uniform(seed, sum(int(np.prod(shape)) for _, shape, _, _ in tensors))
    at = 0
    with torch.no_grad():
        for key, shape, scale, offset in tensors:
            count = int(np.prod(shape))
            values = torch.from_numpy((offset + scale * (2 * drawn[at : at + count] - 1)).astype(np.float32))
            at += count
            if dtype == "BF16":
                values = values.to(torch.bfloat16).float()
            model.state_dict()[key].copy_(values.reshape(shape))
        tokens = [(i * 37 + 11) % _VOCABULARY for i in range(_PROMPT)]
        logits = model(torch.tensor([tokens])).logits[0, -_RECORDED:]
        greedy: list[int] = []
        for _ in range(_NEW_TOKENS):
            greedy.append(int(model(torch.tensor([tokens + greedy])).logits[0, -1].argmax()))
    return {
        "name": name,
        "config": config,
        "seed": seed,
        "dtype": dtype,
        "files": files,
        "tensors": tensors,
        "tokens": tokens,
        "logits": [[float(f"{value:.7g}") for value in row] for row in logits.tolist()],
        "greedy": greedy,
    }


def main() -> None:
    torch.manual_seed(0)
    cases = [make_case(index, *case) for index, case in enumerate(_CASES)]
    for case in cases:
        print(case["name"], "largest logit", max(map(max, case["logits"])), "greedy", case["greedy"])
    Path(sys.argv[1]).write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")


if __name__ == "__main__":
    main()
