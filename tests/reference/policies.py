"""A plain reference of the cache policies: what one layer of one sequence keeps, and what its attention returns.

Scores are float64 sums of attention probabilities. The whole prompt is attended
before anything is evicted; then each decoded token comes in and, once the
budget is reached, one position goes out. Equal scores: the lower position stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from llama_numpy import Floats, causal_probabilities, softmax
from numpy.typing import NDArray

Doubles = NDArray[np.float64]
Ints = NDArray[np.int64]
Name = Literal["full", "streaming", "h2o", "snapkv", "snapkv_h2o"]
Scope = Literal["layer", "kv_head"]


@dataclass(frozen=True)
class Policy:
    """A policy and its parameters. Budgets are positions per layer and KV head."""

    name: Name
    scope: Scope = "layer"
    budget_tokens: int = 0
    recent_tokens: int = 0
    sink_tokens: int = 0  # inside the heavy part of the budget
    window: int = 32  # last queries of the prompt, which vote
    pool: Literal["avg", "max"] = "avg"
    kernel: int = 5
    plan_interval_steps: int = 1
    decay: float = 1.0

    def __post_init__(self) -> None:
        if self.evicts_in_decode and self.recent < 1:
            raise ValueError(f"recent is {self.recent}, want at least 1")
        if self.evicts_in_decode and self.budget_tokens < self.sink_tokens + self.recent:
            wanted = f"{self.sink_tokens} sinks + {self.recent} recent"
            raise ValueError(f"budget is {self.budget_tokens}, want at least {wanted}")

    @property
    def recent(self) -> int:
        """Newest positions that never compete; all but the sinks in `streaming`."""
        return self.budget_tokens - self.sink_tokens if self.name == "streaming" else self.recent_tokens

    @property
    def recent_at_prompt_end(self) -> int:
        """A policy that votes keeps its window, as far as the budget allows."""
        return min(self.window, self.budget_tokens - self.sink_tokens) if self.votes else self.recent

    @property
    def votes(self) -> bool:
        return self.name in ("snapkv", "snapkv_h2o")

    @property
    def evicts_in_decode(self) -> bool:
        return self.name in ("streaming", "h2o", "snapkv_h2o")


def select_kept(positions: Ints, scores: Doubles, policy: Policy, seen: int, recent: int) -> Ints:
    """Indices of the positions that stay, in ascending order of position.

    Sinks and the last `recent` of `seen` positions stay; of the others those
    with the highest scores, until the budget is full.
    """
    protected = (positions < policy.sink_tokens) | (positions >= seen - recent)
    candidates = np.flatnonzero(~protected)
    room = max(policy.budget_tokens - int(protected.sum()), 0)
    best = np.lexsort((positions[candidates], -scores[candidates]))[:room]
    kept = np.concatenate([np.flatnonzero(protected), candidates[best]])
    return kept[np.argsort(positions[kept])]


def pooled(votes: Doubles, kind: str, kernel: int) -> Doubles:
    """Votes [..., columns] averaged (zeros beyond the edges count) or maximised over `kernel` neighbours."""
    half = kernel // 2
    padding = [(0, 0)] * (votes.ndim - 1) + [(half, half)]
    padded = np.pad(votes, padding, constant_values=0.0 if kind == "avg" else -np.inf)
    neighbours = np.lib.stride_tricks.sliding_window_view(padded, kernel, axis=-1)
    return neighbours.mean(axis=-1) if kind == "avg" else neighbours.max(axis=-1)


@dataclass(frozen=True)
class PromptLayer:
    """One layer of a prompt of t tokens: all that any policy needs of it."""

    k: Floats  # [kv_heads, t, head_size], rotated
    v: Floats
    column_sums: Doubles  # [kv_heads, t]: probability received, over all queries and the group's heads
    window_sums: Doubles  # the same, over the last `window` queries


def summarize_prompt(q: Floats, k: Floats, v: Floats, window: int = 32) -> PromptLayer:
    """From q [t, query_heads, head_size] and k, v [t, kv_heads, head_size]."""
    return summarize_probabilities(causal_probabilities(q, k), k, v, window)


def summarize_probabilities(probabilities: Floats, k: Floats, v: Floats, window: int = 32) -> PromptLayer:
    """From the prompt's probabilities [query_heads, t, t]; k and v as in `summarize_prompt`."""
    tokens, kv_heads, _ = k.shape
    by_group = probabilities.reshape(kv_heads, -1, tokens, tokens)
    return PromptLayer(
        k=k.transpose(1, 0, 2).copy(),
        v=v.transpose(1, 0, 2).copy(),
        column_sums=by_group.sum(axis=(1, 2), dtype=np.float64),
        window_sums=by_group[:, :, -window:].sum(axis=(1, 2), dtype=np.float64),
    )


class LayerCache:
    """K, V, positions and scores of one layer of one sequence after its prompt."""

    def __init__(self, policy: Policy, prompt: PromptLayer) -> None:
        self._policy = policy
        kv_heads, self.seen, size = prompt.k.shape
        self._prompt_tokens = self.seen
        seeds = self._shared(prompt.window_sums if policy.votes else prompt.column_sums)
        ranking = self._votes(seeds) if policy.votes else seeds
        kept = [self._prompt_kept(head_ranking) for head_ranking in ranking]

        # Slots are in no order: a newcomer takes the slot of what it displaces.
        self._used = len(kept[0])
        slots = self._used + policy.plan_interval_steps
        self._positions = np.zeros((kv_heads, slots), np.int64)
        self._scores = np.zeros((kv_heads, slots))
        self._k = np.zeros((kv_heads, slots, size), np.float32)
        self._v = np.zeros_like(self._k)
        for head, index in enumerate(kept):
            self._positions[head, : self._used] = index
            self._scores[head, : self._used] = seeds[head, index]
            self._k[head, : self._used] = prompt.k[head, index]
            self._v[head, : self._used] = prompt.v[head, index]

    def append(self, q: Floats, k: Floats, v: Floats) -> Floats:
        """Decodes one token: q [query_heads, head_size], k and v [kv_heads, head_size] -> like q."""
        kv_heads, size = k.shape
        if self._used == self._positions.shape[1]:
            self._grow()
        slot = self._used
        self._positions[:, slot] = self.seen
        self._scores[:, slot] = 0
        self._k[:, slot] = k
        self._v[:, slot] = v
        self._used += 1
        self.seen += 1

        keys, values = self._k[:, : self._used], self._v[:, : self._used]
        grouped = q.reshape(kv_heads, -1, size)
        logits = grouped @ keys.transpose(0, 2, 1) * np.float32(1 / np.sqrt(size))
        probabilities = softmax(logits)
        self._scores[:, : self._used] += self._shared(probabilities.sum(axis=1, dtype=np.float64))
        out = probabilities @ values

        if (self.seen - self._prompt_tokens) % self._policy.plan_interval_steps == 0:
            self._plan()
        return out.reshape(q.shape)

    def kept(self) -> list[Ints]:
        """Resident positions of each KV head, ascending."""
        return [np.sort(row[: self._used]) for row in self._positions]

    def scores(self) -> list[Doubles]:
        """Scores of each KV head, in the order of `kept`."""
        order = np.argsort(self._positions[:, : self._used], axis=1)
        return list(np.take_along_axis(self._scores, order, axis=1))

    def _shared(self, sums: Doubles) -> Doubles:
        """Scope layer: every KV head sees the sum over all heads."""
        if self._policy.scope == "kv_head":
            return sums
        return np.broadcast_to(sums.sum(axis=0), sums.shape)

    def _votes(self, window_sums: Doubles) -> Doubles:
        """Pooled votes on the columns before the window, whose own columns do not compete."""
        before = max(self.seen - self._policy.window, 0)
        votes = np.zeros_like(window_sums)
        if before:
            votes[:, :before] = pooled(window_sums[:, :before], self._policy.pool, self._policy.kernel)
        return votes

    def _prompt_kept(self, ranking: Doubles) -> Ints:
        policy = self._policy
        if policy.name == "full" or self.seen <= policy.budget_tokens:
            return np.arange(self.seen)
        return select_kept(np.arange(self.seen), ranking, policy, self.seen, policy.recent_at_prompt_end)

    def _plan(self) -> None:
        """Brings every KV head back to its budget; slots of victims are handed over in place."""
        policy = self._policy
        if not policy.evicts_in_decode:
            return
        self._scores[:, : self._used] *= policy.decay**policy.plan_interval_steps
        budget = min(policy.budget_tokens, self._used)
        for head in range(len(self._positions)):
            self._keep(head, self._head_kept(head), budget)
        self._used = budget

    def _head_kept(self, head: int) -> Ints:
        positions, scores = self._positions[head, : self._used], self._scores[head, : self._used]
        return select_kept(positions, scores, self._policy, self.seen, self._policy.recent)

    def _keep(self, head: int, kept: Ints, budget: int) -> None:
        victims = np.setdiff1d(np.arange(budget), kept)
        movers = kept[kept >= budget]
        for array in (self._positions, self._scores, self._k, self._v):
            array[head, victims] = array[head, movers]

    def _grow(self) -> None:
        for name in ("_positions", "_scores", "_k", "_v"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros_like(array)], axis=1))


class BatchCache:
    """One cache per sequence and layer, as the `attend` of `Llama.hidden` for one token of each sequence."""

    def __init__(self, sequences: Sequence[Sequence[LayerCache]]) -> None:
        self.sequences = sequences  # [sequence][layer]

    def attend(self, layer: int, q: Floats, k: Floats, v: Floats) -> Floats:
        rows = zip(self.sequences, q, k, v, strict=True)
        return np.stack([layers[layer].append(q1, k1, v1) for layers, q1, k1, v1 in rows])
