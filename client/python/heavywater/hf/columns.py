"""Which columns of a row are tokens and which are padding, as far back as the row goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class _Span:
    columns: int
    tokens: int
    real: Any  # [columns] bool, or None: all of them are tokens


class ColumnBook:
    """Of one row. Columns of tokens alone, as in every step but a padded prompt, take no memory each."""

    def __init__(self) -> None:
        self._spans: list[_Span] = []

    def copy(self) -> ColumnBook:
        twin = ColumnBook()
        twin._spans = [_Span(span.columns, span.tokens, span.real) for span in self._spans]
        return twin

    def saved(self) -> list[Any]:
        """As JSON has it: of each span its columns, or which of them are tokens."""
        return [span.columns if span.real is None else span.real.int().tolist() for span in self._spans]

    @classmethod
    def loaded(cls, spans: list[Any]) -> ColumnBook:
        """What `saved` gave."""
        book = cls()
        for span in spans:
            book.add(torch.ones(span, dtype=torch.bool) if isinstance(span, int) else torch.tensor(span).bool())
        return book

    def add(self, real: Any) -> None:
        """Columns of a step: `real` [columns] is false for padding."""
        columns, tokens = int(real.numel()), int(real.sum())
        last = self._spans[-1] if self._spans else None
        if tokens == columns and last is not None and last.real is None:
            last.columns += columns
            last.tokens += tokens
            return
        self._spans.append(_Span(columns, tokens, None if tokens == columns else real.clone()))

    def tokens_of_last(self, columns: int) -> int:
        """How many of the last `columns` are tokens."""
        tokens = 0
        for span in reversed(self._spans):
            if columns <= 0:
                break
            taken = min(columns, span.columns)
            tokens += taken if span.real is None else int(span.real[span.columns - taken :].sum())
            columns -= taken
        return tokens

    def remove_last(self, columns: int) -> None:
        """Forgets the last `columns`."""
        while columns > 0 and self._spans:
            span = self._spans.pop()
            left = span.columns - columns
            columns -= span.columns
            if left <= 0:
                continue
            if span.real is None:
                self._spans.append(_Span(left, left, None))
                return
            real = span.real[:left]
            self._spans.append(_Span(left, int(real.sum()), real))
