"""How a row goes back by some tokens, whatever its policy has forgotten meanwhile: from a copy of its state from
before, and the Q, K and V that came since then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from heavywater.engine import AttentionEngine, EngineItem, Phase


@dataclass
class _Mark:
    """A copy of the row's sequence when it had taken in `taken` tokens."""

    sequence: int
    taken: int


@dataclass
class _Step:
    first: int
    count: int
    layers: list[tuple[Any, Any, Any]] = field(default_factory=list)  # q, k, v: [count][heads][head_dim]


class Rollback:
    """Of one row, after its prompt. The last `tokens` tokens can be taken back, and the last step whatever its length.

    Holds up to three copies of the row's state, and Q, K and V of at most some 2 x `tokens` tokens.
    """

    def __init__(self, engine: AttentionEngine, ids: Iterator[int], tokens: int) -> None:
        self.tokens = tokens
        self._engine = engine
        self._ids = ids
        self._marks: list[_Mark] = []  # ascending
        self._steps: list[_Step] = []  # since the oldest mark

    @property
    def reaches(self) -> int | None:
        """The fewest tokens that the row can go back to; None: it cannot."""
        return self._marks[0].taken if self._marks else None

    def before_step(self, sequence: int, taken: int, count: int) -> None:
        """A step of `count` tokens begins, out of the engine's step."""
        if not self._marks or taken - self._marks[-1].taken >= max(self.tokens, 1):
            mark = _Mark(next(self._ids), taken)
            self._engine.fork(mark.sequence, self._engine, sequence)
            self._marks.append(mark)
        self._steps.append(_Step(taken, count))

    def note(self, queries: Any, keys: Any, values: Any) -> None:
        """What the next layer of the step has brought."""
        self._steps[-1].layers.append((queries.clone(), keys.clone(), values.clone()))

    def after_step(self, taken: int) -> None:
        """The step has ended: what lies further back than is promised goes."""
        bound = min(taken - self.tokens, self._steps[-1].first)
        while len(self._marks) > 1 and self._marks[1].taken <= bound:
            self._engine.close(self._marks.pop(0).sequence)
        self._steps = [step for step in self._steps if step.first >= self._marks[0].taken]

    def back_to(self, taken: int) -> int:
        """A new sequence of the engine, as the row's was or would have been after `taken` tokens, at least
        `reaches`: a step that is cut is run again with the tokens that stay."""
        while self._marks[-1].taken > taken:
            self._engine.close(self._marks.pop().sequence)
        mark = self._marks[-1]
        sequence = next(self._ids)
        self._engine.fork(sequence, self._engine, mark.sequence)
        self._steps = [step for step in self._steps if step.first < taken]
        if self._steps:
            _cut(self._steps[-1], taken)
        for step in self._steps:
            if step.first >= mark.taken:
                self._run(sequence, step)
        return sequence

    def close(self) -> None:
        """Frees the copies."""
        marks, self._marks, self._steps = self._marks, [], []
        for mark in marks:
            self._engine.close(mark.sequence)

    def _run(self, sequence: int, step: _Step) -> None:
        self._engine.begin([EngineItem(sequence, Phase.DECODE, step.first, step.count)])
        for layer, (queries, keys, values) in enumerate(step.layers):
            self._engine.attend(layer, queries, keys, values, torch.empty_like(queries))
        self._engine.end()


def _cut(step: _Step, taken: int) -> None:
    """The step's tokens from `taken` on have never come."""
    count = min(step.count, taken - step.first)
    if count == step.count:
        return
    step.count = count
    step.layers = [tuple(rows[:count].clone() for rows in layer) for layer in step.layers]
