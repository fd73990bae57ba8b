"""How much the memory of the process grows by a generation, with this cache or that.

.venv-hf/bin/python tests/client/hf/process_memory.py prints the rows of docs/transformers.md.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.append(str(Path(__file__).resolve().parents[2] / "reference"))

import heavywater.hf
from hf_models import greedy, prompt, tiny


@dataclass(frozen=True)
class Grown:
    """KiB; of a cache that is not ours 0 but the first."""

    grown_kib: int
    kv_kib: int = 0
    peak_kib: int = 0
    host_kib: int = 0


def wide(layers: int, context: int) -> transformers.PreTrainedModel:
    """8 KV heads of 128 in float32: 8 KiB a token and layer; next to nothing of weights."""
    return tiny("llama", num_hidden_layers=layers, num_key_value_heads=8, head_dim=128, max_position_embeddings=context)


def resident_kib() -> int:
    """Of the process, after its allocator has given back what is free."""
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))


def measure(model: Any, tokens: int, cache_of: Callable[[], Any]) -> Grown:
    """By one generation of a few tokens after so many."""
    ids = prompt(tokens)
    greedy(model, prompt(40), 4, cache=cache_of())  # what a first run sets up
    before = resident_kib()
    cache = cache_of()
    greedy(model, ids, 4, cache=cache)
    grown = resident_kib() - before
    if not isinstance(cache, heavywater.hf.HeavywaterCache):
        return Grown(grown)
    stats = cache.stats()
    return Grown(grown, stats.kv_bytes // 1024, stats.peak_kv_bytes // 1024, stats.host_bytes // 1024)


def main() -> None:
    torch.manual_seed(7)
    torch.set_num_threads(1)
    model = wide(layers=16, context=8192)
    bounded = {"policy": "snapkv_h2o", "heavy_ratio": 0.1, "recent_ratio": 0.1}
    caches: dict[str, Callable[[], Any]] = {
        "Transformers' own": lambda: transformers.DynamicCache(config=model.config),
        "full": lambda: heavywater.hf.attach(model, policy="full"),
        "snapkv_h2o, 10 % + 10 %": lambda: heavywater.hf.attach(model, **bounded),
        "the same with recall": lambda: heavywater.hf.attach(model, recall=True, **bounded),
    }
    for name, cache_of in caches.items():
        one = measure(model, 4000, cache_of)
        figures = (one.grown_kib, one.kv_kib, one.peak_kib, one.host_kib)
        print(f"| {name} | " + " | ".join(f"{kib / 1024:.0f} MiB" for kib in figures) + " |", flush=True)


if __name__ == "__main__":
    main()
