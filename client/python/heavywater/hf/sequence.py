"""One row of a batch: a sequence of its own engine, which takes the row's tokens in and leaves padding out."""

from __future__ import annotations

from typing import Any

import torch

from heavywater.engine import AttentionEngine, EngineItem, Phase, PolicyOptions


class RowSequence:
    """A row's engine and what it has taken in. Each row has an engine of its own, since a prompt must be alone in its
    step to be of any length, and a batch comes layer by layer, all rows in each."""

    def __init__(self, sequence: int, engine: AttentionEngine, policy: PolicyOptions, max_tokens: int) -> None:
        self.sequence = sequence
        self.engine = engine
        self.taken = 0  # tokens, padding left out
        self._policy = policy
        self._max_tokens = max_tokens
        self._prompt_tokens = 0
        self._count = 0  # tokens of the running step
        self._chosen: Any = slice(0, 0)  # which of the row's columns they are

    def begin(self, real: Any, columns_left: int) -> None:
        """Begins a step with the columns of the row for which `real` [T] is true. `columns_left`: of the prompt after
        these T, which tells a row that has just begun how long its prompt is."""
        index = torch.nonzero(real).flatten()
        self._count = int(index.numel())
        if self._count == 0:
            return
        first, last = int(index[0]), int(index[-1])
        self._chosen = slice(first, last + 1) if last - first + 1 == self._count else index
        if self.taken == 0:
            prompt_tokens = self._count + columns_left
            self.engine.open(
                self.sequence,
                self._policy,
                prompt_tokens=prompt_tokens,
                max_tokens=self._max_tokens,
                prompt_in_steps=columns_left > 0,
            )
            self._prompt_tokens = prompt_tokens  # once it is open: close() closes it
        self.engine.begin([EngineItem(self.sequence, self._phase(), self.taken, self._count)])

    def attend(self, layer: int, queries: Any, keys: Any, values: Any, out: Any) -> None:
        """Arrays [T][heads][head_dim], float32; rows of `out` that are padding are left as they are."""
        if self._count == 0:
            return
        q, k, v = (rows[self._chosen].contiguous() for rows in (queries, keys, values))
        if isinstance(self._chosen, slice):
            self.engine.attend(layer, q, k, v, out[self._chosen])
            return
        part = torch.empty_like(q)
        self.engine.attend(layer, q, k, v, part)
        out[self._chosen] = part

    def end(self) -> None:
        """Ends the step."""
        if self._count == 0:
            return
        self.engine.end()
        self.taken += self._count
        self._count = 0

    def close(self) -> None:
        """Frees what the row holds."""
        self.engine.abandon()
        if self._prompt_tokens > 0:
            self.engine.close(self.sequence)

    @property
    def prompt_done(self) -> bool:
        """Whether the row has residents and demoted tokens, not a prompt that still comes in."""
        return 0 < self._prompt_tokens <= self.taken

    def _phase(self) -> Phase:
        after = self.taken + self._count
        if self.taken >= self._prompt_tokens:
            return Phase.DECODE
        return Phase.PROMPT if after < self._prompt_tokens else Phase.PROMPT_LAST
