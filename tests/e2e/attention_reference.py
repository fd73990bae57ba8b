"""For the end-to-end tests of AttentionService: synthetic Q, K and V, and what plain references make of them."""

from __future__ import annotations

import sys

import numpy as np
from cluster import ROOT

sys.path.insert(0, str(ROOT / "tests/reference"))
import policies
import recall
from llama_numpy import causal_probabilities, softmax, weighted_values

LAYERS, QUERY_HEADS, KV_HEADS, SIZE = 2, 9, 3, 64
GROUP = QUERY_HEADS // KV_HEADS
PAGE = 32
FLAGS = {
    "model": "none",
    "engine_model": "synthetic",
    "engine_layers": LAYERS,
    "engine_query_heads": QUERY_HEADS,
    "engine_kv_heads": KV_HEADS,
    "engine_head_dim": SIZE,
    "kv_dtype": "fp32",
    "page_tokens": PAGE,
}


class Text:
    """Q, K and V of one sequence, [layers, tokens, heads, head size]."""

    def __init__(self, seed: int, tokens: int) -> None:
        rng = np.random.default_rng(seed)
        self.q, self.k, self.v = (
            rng.standard_normal((LAYERS, tokens, heads, SIZE), dtype=np.float32)
            for heads in (QUERY_HEADS, KV_HEADS, KV_HEADS)
        )
        # As in a model, few channels carry most of the logits' variance, and queries agree.
        self.k[..., ::5] *= 3
        self.q += rng.standard_normal((LAYERS, 1, QUERY_HEADS, SIZE), dtype=np.float32)

    def rows(self, first: int, count: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows = slice(first, first + count)
        return self.q[:, rows], self.k[:, rows], self.v[:, rows]

    def prompt_out(self, layer: int, tokens: int) -> np.ndarray:
        q, k, v = (array[layer, :tokens] for array in (self.q, self.k, self.v))
        return weighted_values(causal_probabilities(q, k), v)

    def full_out(self, layer: int, position: int) -> np.ndarray:
        """Attention of one query to the whole text before it, itself included."""
        out = np.empty((QUERY_HEADS, SIZE))
        for head in range(QUERY_HEADS):
            keys, values = (array[layer, : position + 1, head // GROUP] for array in (self.k, self.v))
            out[head] = softmax(keys.astype(np.float64) @ self.q[layer, position, head] / np.sqrt(SIZE)) @ values
        return out


class PolicyReference:
    """A sequence in the plain reference of the policies."""

    def __init__(self, text: Text, prompt: int, policy: policies.Policy) -> None:
        self.text = text
        self.layers = [
            policies.LayerCache(
                policy, policies.summarize_prompt(*(a[layer, :prompt] for a in (text.q, text.k, text.v)), policy.window)
            )
            for layer in range(LAYERS)
        ]

    def append(self, position: int) -> np.ndarray:
        q, k, v = (array[:, position] for array in (self.text.q, self.text.k, self.text.v))
        return np.stack([layer.append(q[i], k[i], v[i]) for i, layer in enumerate(self.layers)])

    def kept(self, layer: int) -> list[list[int]]:
        return [kept.tolist() for kept in self.layers[layer].kept()]


class RecallReference:
    """snapkv_h2o, scope layer, with recall and without promotion, one layer.

    The prompt fills whole pages, and no more tokens follow than are recent: so what is
    demoted belongs to the prompt, and its sketch stays as it is.
    """

    def __init__(self, text: Text, layer: int, prompt: int, policy: policies.Policy, *, picks: int) -> None:
        self.text, self.layer, self.prompt, self.policy, self.max_picks = text, layer, prompt, policy, picks
        q, k, v = (array[layer, :prompt] for array in (text.q, text.k, text.v))
        cache = policies.LayerCache(policy, policies.summarize_prompt(q, k, v, policy.window))
        positions = cache.kept()[0]
        self.scores = dict(zip(positions.tolist(), cache.scores()[0].tolist(), strict=True))
        self.gains: dict[int, float] = {}
        self.pages = []
        for head in range(KV_HEADS):
            queries = q[:, head * GROUP : (head + 1) * GROUP]
            chosen = recall.choose_channels(queries, k[:, head], recall.default_channels(SIZE))
            self.pages.append([recall.encode_page(k[at : at + PAGE, head], chosen) for at in range(0, prompt, PAGE)])
        self.seen = prompt

    def append(self) -> tuple[np.ndarray, list[list[int]]]:
        """Decodes the next token: its output [query heads, head size], and each KV head's picks."""
        position = self.seen
        self.scores.setdefault(position, 0.0)
        self.seen += 1
        slots = np.array(sorted(self.scores))
        demoted = np.setdiff1d(np.arange(self.prompt), slots)
        out, picks = [], []
        for head in range(KV_HEADS):
            k, v = (array[self.layer, : self.seen, head] for array in (self.text.k, self.text.v))
            got = recall.attend(
                self.text.q[self.layer, position, head * GROUP : (head + 1) * GROUP],
                k[slots],
                v[slots],
                recall.Demoted(k[: self.prompt], v[: self.prompt], self.pages[head], demoted),
                scale=1 / np.sqrt(SIZE),
                max_picks=self.max_picks,
            )
            out.append(got.out)
            picks.append(got.picks.tolist())
            for slot, gain in zip(slots.tolist(), got.slot_probabilities.sum(axis=0).tolist(), strict=True):
                self.gains[slot] = self.gains.get(slot, 0.0) + gain
        if (self.seen - self.prompt) % self.policy.plan_interval_steps == 0:
            self._plan()
        return np.concatenate(out), picks

    def _plan(self) -> None:
        decay = self.policy.decay**self.policy.plan_interval_steps
        slots = np.array(sorted(self.scores))
        scores = np.array([self.scores[s] * decay + self.gains.get(s, 0.0) for s in slots.tolist()])
        kept = policies.select_kept(slots, scores, self.policy, self.seen, self.policy.recent)
        self.scores = {int(slots[i]): float(scores[i]) for i in kept}
        self.gains = {}
