"""Whether a policy still finds one sentence of a long text, asked for before or after the text is compressed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from heavywater.client import Client
from heavywater.eval.haystack import CODE_DIGITS, Needle
from heavywater.eval.measure import require_all_copies, sets_of_plan
from heavywater.eval.rows import Row
from heavywater.v1 import common_pb2, generation_pb2


@dataclass(frozen=True)
class Answer:
    """What came for one needle."""

    needle: Needle
    got: str  # greedy tokens, as many as the code has digits
    device_bytes: int  # measured, peak after the prompt
    full_cache_bytes: int
    recall: common_pb2.RecallCounts
    resident: float | None = None  # of a miss: the needle's tokens in slots at the end, mean over sets

    @property
    def hit(self) -> bool:
        return self.got == self.needle.code

    def describe(self) -> str:
        """For a list of misses."""
        text = f"{self.needle.label}: want {self.needle.code}, got {self.got!r}"
        if self.resident is None:
            return text
        tokens = len(self.needle.positions)
        return f"{text}; of its {tokens} tokens {self.resident:.1f} resident, {tokens - self.resident:.1f} demoted"


@dataclass(frozen=True)
class NeedleResult:
    """A row's answers."""

    row: Row
    question_after: bool
    answers: list[Answer]

    @property
    def hits(self) -> int:
        return sum(answer.hit for answer in self.answers)

    @property
    def misses(self) -> list[Answer]:
        return [answer for answer in self.answers if not answer.hit]

    @property
    def bytes_ratio(self) -> float:
        full = sum(answer.full_cache_bytes for answer in self.answers)
        return sum(answer.device_bytes for answer in self.answers) / full

    @property
    def reads_mean(self) -> float:
        """Demoted positions that a query read in place, per KV head and layer."""
        queries = sum(answer.recall.queries for answer in self.answers)
        return sum(answer.recall.reads for answer in self.answers) / queries if queries else 0.0

    @property
    def reads_max(self) -> int:
        return max(answer.recall.reads_max for answer in self.answers)

    def as_json(self) -> dict[str, Any]:
        """Fields that do not apply are null."""
        return {
            "policy": self.row.policy,
            "preset": self.row.preset,
            "budget": self.row.budget,
            "recall": self.row.recall is not None,
            "recall_tokens": self.row.recall,
            "question_after": self.question_after,
            "bytes_ratio": self.bytes_ratio,
            "hits": self.hits,
            "total": len(self.answers),
        }


class NeedleEvaluation:
    """Asks for every needle under each row's policy, several at once (the server batches them)."""

    def __init__(
        self,
        client: Client,
        needles: Sequence[Needle],
        *,
        parallel: int,
        on_answer: Callable[[], None] = lambda: None,
    ) -> None:
        self._client = client
        self._needles = needles
        self._parallel = parallel
        self._on_answer = on_answer

    def run(self, row: Row, question_after: bool) -> NeedleResult:
        """`question_after`: the text is compressed before the question is seen."""
        pool = ThreadPoolExecutor(self._parallel)
        try:
            pending = [pool.submit(self._ask, row, needle, question_after) for needle in self._needles]
            return NeedleResult(row, question_after, [one.result() for one in pending])
        finally:
            pool.shutdown(cancel_futures=True)

    def _ask(self, row: Row, needle: Needle, question_after: bool) -> Answer:
        prompt = needle.context if question_after else needle.context + needle.question
        with self._client.generate(
            prompt,
            suffix=needle.question if question_after else (),
            max_new_tokens=CODE_DIGITS,
            ignore_eos=True,
            policy=row.options(len(prompt)),
        ) as generation:
            got = generation.text()
        summary = generation.summary
        require_all_copies(f"{row.name}, {needle.label}", summary)
        missed = got != needle.code
        resident = None
        if self._client.has_cache:
            if missed and row.budget is not None:
                resident = self._resident(needle, generation.sequence_id, summary)
            self._client.close(generation.sequence_id)  # frees its pages
        self._on_answer()
        return Answer(
            needle, got, summary.device_bytes_peak, summary.full_cache_bytes, summary.recall, resident=resident
        )

    def _resident(self, needle: Needle, sequence_id: int, summary: generation_pb2.GenerateSummary) -> float:
        wanted = np.array(needle.positions)
        sets = sets_of_plan(self._client, sequence_id, summary.plan)
        return float(np.mean([np.isin(wanted, one.resident).sum() for one in sets]))
