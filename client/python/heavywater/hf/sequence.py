"""One row of a batch: a sequence of its own engine, which takes the row's tokens in and leaves padding out."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from heavywater.engine import AttentionEngine, EngineItem, Phase, PolicyOptions
from heavywater.hf.columns import ColumnBook
from heavywater.hf.rollback import Rollback


@dataclass(frozen=True)
class RowOptions:
    """What all rows of a cache have in common."""

    policy: PolicyOptions
    max_tokens: int
    crop_tokens: int | None  # that can be taken back; 0: the last step's; None: none but under policy full


class RowSequence:
    """A row's engine and what it has taken in. Each row has an engine of its own, since a prompt must be alone in its
    step to be of any length, and a batch comes layer by layer, all rows in each."""

    def __init__(self, ids: Iterator[int], engine: AttentionEngine, options: RowOptions) -> None:
        self.sequence = next(ids)
        self.name = uuid.uuid4().hex  # of what its positions hold: another once some were taken back
        self.engine = engine
        self.taken = 0  # tokens, padding left out
        self._ids = ids
        self._options = options
        self._rollback: Rollback | None = None
        self._columns = ColumnBook()
        self._prompt_tokens = 0
        self._count = 0  # tokens of the running step
        self._chosen: Any = slice(0, 0)  # which of the row's columns they are

    def begin(self, real: Any, columns_left: int) -> None:
        """Begins a step with the columns of the row for which `real` [T] is true. `columns_left`: of the prompt after
        these T, which tells a row that has just begun how long its prompt is."""
        index = torch.nonzero(real).flatten()
        self._count = int(index.numel())
        self._columns.add(real)
        if self._count == 0:
            return
        first, last = int(index[0]), int(index[-1])
        self._chosen = slice(first, last + 1) if last - first + 1 == self._count else index
        if self.taken == 0:
            self._open(self._count + columns_left, in_steps=columns_left > 0)
        elif self.prompt_done and self._rollback is not None:
            self._rollback.before_step(self.sequence, self.taken, self._count)
        self.engine.begin([EngineItem(self.sequence, self._phase(), self.taken, self._count)])

    def attend(self, layer: int, queries: Any, keys: Any, values: Any, out: Any) -> None:
        """Arrays [T][heads][head_dim], float32; rows of `out` that are padding are left as they are."""
        if self._count == 0:
            return
        q, k, v = (rows[self._chosen].contiguous() for rows in (queries, keys, values))
        if self.prompt_done and self._rollback is not None:
            self._rollback.note(q, k, v)
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
        in_prompt = not self.prompt_done
        self.taken += self._count
        self._count = 0
        if self._rollback is not None and not in_prompt:
            self._rollback.after_step(self.taken)

    def record_past(self) -> None:
        """From the next step on the last one can be taken back, and `crop_tokens` if they are more."""
        if self._rollback is None and not self._keeps_all:
            self._rollback = Rollback(self.engine, self._ids, self._options.crop_tokens or 0)

    def check_crop(self, columns: int) -> None:
        """NotImplementedError unless `crop` can take so many columns back, naming how many it could."""
        tokens = self._columns.tokens_of_last(columns)
        left = self.taken - tokens
        if tokens == 0 or left == 0:
            return
        if not self.prompt_done:
            raise NotImplementedError(f"crop(-{columns}) of a HeavywaterCache whose prompt has not all come")
        if self._keeps_all:
            return
        reaches = self._rollback.reaches if self._rollback is not None else None
        if reaches is None or left < reaches:
            possible = 0 if reaches is None else self.taken - reaches
            raise NotImplementedError(
                f"crop(-{columns}) of a HeavywaterCache whose policy forgets: it would take {tokens} tokens of a row "
                f"back, and can take {possible}; want at most that, all of the tokens, a larger crop_tokens of "
                'attach(), or policy="full"'
            )

    def crop(self, columns: int) -> None:
        """As if the last `columns` had never come. After check_crop()."""
        left = self.taken - self._columns.tokens_of_last(columns)
        self._columns.remove_last(columns)
        if left == self.taken:
            return
        if left == 0:
            self._forget()
        elif self._keeps_all:
            self.engine.truncate(self.sequence, left)
        else:
            assert self._rollback is not None
            before, self.sequence = self.sequence, self._rollback.back_to(left)
            self.engine.close(before)
        self.taken, self.name = left, uuid.uuid4().hex
        self._prompt_tokens = min(self._prompt_tokens, left)

    def copy(self, engine: AttentionEngine) -> RowSequence:
        """A row that goes on from here by itself. NotImplementedError within a prompt that comes in chunks."""
        if self.taken > 0 and not self.prompt_done:
            raise NotImplementedError("a row of a HeavywaterCache cannot be copied before all of its prompt has come")
        twin = RowSequence(self._ids, engine, self._options)
        if self.taken > 0:
            engine.fork(twin.sequence, self.engine, self.sequence)
        twin.taken, twin._prompt_tokens = self.taken, self._prompt_tokens
        twin._columns = self._columns.copy()
        if self._rollback is not None:
            twin.record_past()
        return twin

    def saved(self) -> dict[str, Any]:
        """What describes the row beside its engine's state, as JSON has it."""
        return {
            "row": self.name,
            "taken": self.taken,
            "prompt_tokens": self._prompt_tokens,
            "columns": self._columns.saved(),
        }

    def load(self, saved: dict[str, Any]) -> None:
        """An empty row as the one that was saved: with "state" and "pages", bytes of its engine."""
        self.engine.load_state(
            self.sequence,
            self._options.policy,
            prompt_tokens=saved["prompt_tokens"],
            max_tokens=self._options.max_tokens,
            state=saved["state"],
            pages=saved["pages"],
            tokens_seen=saved["taken"],
        )
        self.name, self.taken, self._prompt_tokens = saved["row"], saved["taken"], saved["prompt_tokens"]
        self._columns = ColumnBook.loaded(saved["columns"])
        if self._options.crop_tokens is not None:
            self.record_past()

    @property
    def has_pages(self) -> bool:
        """Whether what leaves the device stays in host memory."""
        return self._options.policy.recall.enabled

    def close(self) -> None:
        """Frees what the row holds; its engine can serve another."""
        self.engine.abandon()
        self._forget()

    @property
    def prompt_done(self) -> bool:
        """Whether the row has residents and demoted tokens, not a prompt that still comes in."""
        return 0 < self._prompt_tokens <= self.taken

    @property
    def _keeps_all(self) -> bool:
        return self._options.policy.policy == "full"

    def _open(self, prompt_tokens: int, in_steps: bool) -> None:
        self.engine.open(
            self.sequence,
            self._options.policy,
            prompt_tokens=prompt_tokens,
            max_tokens=self._options.max_tokens,
            prompt_in_steps=in_steps,
        )
        self._prompt_tokens = prompt_tokens  # once it is open: close() closes it
        if self._options.crop_tokens is not None:
            self.record_past()

    def _forget(self) -> None:
        if self._rollback is not None:
            self._rollback.close()
        if self._prompt_tokens > 0:
            self.engine.close(self.sequence)
        self._prompt_tokens = 0

    def _phase(self) -> Phase:
        after = self.taken + self._count
        if self.prompt_done:
            return Phase.DECODE
        return Phase.PROMPT if after < self._prompt_tokens else Phase.PROMPT_LAST
