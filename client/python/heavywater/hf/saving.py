"""What a cache writes to its session, and how it goes on from one."""

from __future__ import annotations

import dataclasses
from typing import Any

from heavywater.engine import AttentionShape
from heavywater.errors import HeavywaterError
from heavywater.hf.fingerprint import check_same
from heavywater.hf.rows import BatchRows
from heavywater.hf.session import Session


class Saver:
    """Of one cache."""

    def __init__(self, session: Session, fingerprint: dict[str, Any]) -> None:
        self._session = session
        self._fingerprint = fingerprint
        self._behind = False  # a page could not be written: the next commit tries again

    def begin(self) -> None:
        """A new session: what the service has under its name goes."""
        self._session.begin()

    def write_through(self, rows: BatchRows) -> None:
        """After a step: pages that are full now. A service that is away stops no forward pass; commit() says it."""
        if self._behind:
            return
        try:
            self._write_pages(rows)
        except HeavywaterError:
            self._behind = True

    def commit(self, rows: BatchRows) -> None:
        """All of the batch, as it is now. HeavywaterError: the last commit is still good."""
        if rows.in_step or any(not row.prompt_done for row in rows.rows):
            raise RuntimeError("a cache is committed after a forward pass that has ended a prompt, want that first")
        if not rows.rows or rows.shape is None:
            raise RuntimeError("a cache that has taken nothing in cannot be committed")
        self._write_pages(rows)
        self._behind = False
        saved, states = [], []
        for row in rows.rows:
            full_pages, in_tail = divmod(row.taken, rows.options.page_tokens) if row.has_pages else (0, 0)
            tail = row.engine.read_page(row.sequence, full_pages) if in_tail else b""
            saved.append({**row.saved(), "full_pages": full_pages})
            states.append((row.engine.save_state(row.sequence), tail))
        facts = {
            "fingerprint": self._fingerprint,
            "shape": dataclasses.asdict(rows.shape),
            "scale": rows.scale,
            "columns": rows.columns,
        }
        self._session.commit(facts, saved, states)

    def resume(self, rows: BatchRows) -> None:
        """Empty rows go on from the last commit. NOT_FOUND, DATA_LOSS; ValueError names what differs."""
        facts, saved = self._session.load()
        check_same(facts["fingerprint"], self._fingerprint)
        rows.restore(AttentionShape(**facts["shape"]), facts["scale"], facts["columns"], saved)

    def _write_pages(self, rows: BatchRows) -> None:
        for row in rows.rows:
            if not row.has_pages or not row.prompt_done:
                continue
            for page in range(self._session.pages_written(row.name), row.taken // rows.options.page_tokens):
                self._session.write_page(row.name, page, row.engine.read_page(row.sequence, page))
