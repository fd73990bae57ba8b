"""Questions about long texts under each policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from heavywater.client import Client
from heavywater.eval.book_questions import Question
from heavywater.eval.measure import require_all_copies
from heavywater.eval.rows import Row


@dataclass(frozen=True)
class QaResult:
    """A row's score: questions whose greedy answer begins with the name."""

    row: Row
    right: int
    total: int
    bytes_ratio: float

    @property
    def score(self) -> float:
        return self.right / self.total

    def as_json(self) -> dict[str, Any]:
        return {
            "policy": self.row.policy,
            "scope": self.row.scope,
            "budget": self.row.budget,
            "recall": self.row.recall is not None,
            "bytes_ratio": self.bytes_ratio,
            "right": self.right,
            "total": self.total,
            "score": self.score,
        }


@dataclass(frozen=True)
class _Answer:
    right: bool
    device_bytes: int
    full_cache_bytes: int


class QaEvaluation:
    """Asks every question under a row's policy, several at once (the server batches them)."""

    def __init__(
        self,
        client: Client,
        questions: Sequence[Question],
        *,
        question_after: bool,
        parallel: int,
        on_answer: Callable[[], None] = lambda: None,
    ) -> None:
        self._client = client
        self._questions = questions
        self._question_after = question_after
        self._parallel = parallel
        self._on_answer = on_answer

    def run(self, row: Row) -> QaResult:
        pool = ThreadPoolExecutor(self._parallel)
        try:
            answers = [one.result() for one in [pool.submit(self._ask, row, one) for one in self._questions]]
        finally:
            pool.shutdown(cancel_futures=True)
        full_bytes = sum(answer.full_cache_bytes for answer in answers)
        return QaResult(
            row,
            right=sum(answer.right for answer in answers),
            total=len(answers),
            bytes_ratio=sum(answer.device_bytes for answer in answers) / full_bytes,
        )

    def _ask(self, row: Row, question: Question) -> _Answer:
        after = self._question_after
        prompt = question.context if after else question.context + question.question
        with self._client.generate(
            prompt,
            suffix=question.question if after else (),
            max_new_tokens=question.answer_tokens,
            ignore_eos=True,
            policy=row.options(len(prompt)),
        ) as generation:
            got = generation.text()
        summary = generation.summary
        require_all_copies(f"{row.name}, document {question.document}", summary)
        if self._client.has_cache:
            self._client.close(generation.sequence_id)  # frees its pages
        self._on_answer()
        return _Answer(got.strip() == question.answer, summary.device_bytes_peak, summary.full_cache_bytes)
