"""Perplexity and divergence from the full cache of each policy at each budget."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heavywater.client import Client
from heavywater.eval.dump import Dump
from heavywater.eval.figures import Logits, Totals
from heavywater.eval.logits_file import make_logits_file
from heavywater.eval.measure import Measurement, Window, measure
from heavywater.eval.rows import EVEN, Row


@dataclass(frozen=True)
class RowResult:
    """A row's figures over all windows."""

    row: Row
    totals: Totals
    bytes_ratio: float

    def as_json(self) -> dict[str, Any]:
        """Fields that do not apply, or are not measured, are null; `head_budgets` is there where they are not even."""
        divided = {} if self.row.head_budgets == EVEN else {"head_budgets": self.row.head_budgets}
        return divided | {
            "policy": self.row.policy,
            "scope": self.row.scope,
            "budget": self.row.budget,
            "recall": self.row.recall is not None,
            "recall_tokens": self.row.recall,
            "bytes_ratio": self.bytes_ratio,
            "ppl": self.totals.ppl,
            "kl": self.totals.mean_kl,
            "agree": self.totals.agree,
            "mass_kept": None,
        }


def row_result(row: Row, measurements: Iterable[Measurement]) -> RowResult:
    """Sums a row's windows."""
    totals, device_bytes, full_bytes = Totals(), 0, 0
    for measurement in measurements:
        totals += measurement.totals
        device_bytes += measurement.device_bytes
        full_bytes += measurement.full_cache_bytes
    return RowResult(row, totals, device_bytes / full_bytes)


class PplEvaluation:
    """Runs rows x windows, several at once (the server batches them), results row by row."""

    def __init__(
        self,
        client: Client,
        vocab_size: int,
        windows: list[Window],
        *,
        parallel: int,
        dump: Path | None = None,
        on_token: Callable[[], None] = lambda: None,
    ) -> None:
        self._client = client
        self._vocab_size = vocab_size
        self._windows = windows
        self._parallel = parallel
        self._dump = dump
        self._on_token = on_token

    def run(self, rows: list[Row], on_row: Callable[[RowResult], None]) -> list[RowResult]:
        """`rows` begins with the full cache: the others are compared with its logits."""
        if rows[0].budget is not None:
            raise ValueError(f"the first row is {rows[0].name}, want full")
        # Logits of the full cache stay on disk: 100 MB a window of 512 targets.
        with tempfile.TemporaryDirectory(prefix="heavywater-ppl-") as scratch:
            full = [
                make_logits_file(Path(scratch) / f"{window.offset}.npy", len(window.targets), self._vocab_size)
                for window in self._windows
            ]
            return self._run_rows(rows, full, on_row)

    def _run_rows(self, rows: list[Row], full: list[Logits], on_row: Callable[[RowResult], None]) -> list[RowResult]:
        results = []
        pool = ThreadPoolExecutor(self._parallel)
        try:
            for stage in (rows[:1], rows[1:]):
                pending = [
                    (row, [pool.submit(self._measure, row, *pair) for pair in zip(self._windows, full, strict=True)])
                    for row in stage
                ]
                for row, futures in pending:
                    results.append(row_result(row, [future.result() for future in futures]))
                    on_row(results[-1])
        finally:
            pool.shutdown(cancel_futures=True)
        return results

    def _measure(self, row: Row, window: Window, full: Logits) -> Measurement:
        dump = Dump(self._dump, row, window, self._vocab_size) if self._dump else None
        result = measure(
            self._client,
            row,
            window,
            full,
            keep_logits=dump,
            read_sets=dump is not None,
            on_token=self._on_token,
        )
        if dump is not None:
            dump.finish(result)
        return result
