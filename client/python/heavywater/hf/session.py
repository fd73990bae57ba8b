"""A cache's copy at a running cache service, from which another process goes on: values by key (heavywater.blobs).

Pages of demoted tokens are written through when they are full, and never change. A commit writes the rest, which the
policy bounds: each row's state and its open page. Two commits are kept; the newer whole one counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from heavywater.blobs import BlobClient
from heavywater.errors import HeavywaterError

_FORMAT = 1
_PART_BYTES = 32 << 20  # a value of the service has 64 MiB at most
_MAX_NAME_BYTES = 200


class Session:
    """Of one cache at a time. Every call raises HeavywaterError."""

    def __init__(self, blobs: BlobClient, name: str) -> None:
        if not name or len(name.encode()) > _MAX_NAME_BYTES:
            raise ValueError(f"session is {name!r}, want 1 to {_MAX_NAME_BYTES} bytes")
        self.name = name
        self._blobs = blobs
        self._space = f"heavywater.hf/{name}"
        self._commit = 0  # the number of the last one
        self._written: dict[str, int] = {}  # pages by row
        self._page_bytes = 0

    def begin(self) -> None:
        """Forgets what the service has of this name."""
        self._blobs.erase(self._space)

    def pages_written(self, row: str) -> int:
        return self._written.get(row, 0)

    def write_page(self, row: str, page: int, data: bytes) -> None:
        """A full page, in their order."""
        self._put(f"page/{row}/{page}", data)
        self._written[row] = page + 1
        self._page_bytes = len(data)

    def commit(self, facts: dict[str, Any], rows: list[dict[str, Any]], states: list[tuple[bytes, bytes]]) -> None:
        """`rows`: what describes each, "row" being its name; `states`: its state and its open page (or b"")."""
        number = self._commit + 1
        for index, (state, tail) in enumerate(states):
            rows[index] |= {"state_bytes": len(state), "tail_bytes": len(tail), "page_bytes": self._page_bytes}
            self._put(f"state/{number}/{index}", state)
            self._put(f"tail/{number}/{index}", tail)
        manifest = {"format": _FORMAT, "facts": facts, "rows": rows}
        self._put(f"manifest/{number}", json.dumps(manifest).encode())
        self._put(f"head/{number % 2}", str(number).encode())
        self._commit = number
        self._forget_before(number - 1, {row["row"] for row in rows}, len(rows))

    def load(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The newest whole commit: its facts, and its rows with "state", "pages" (bytes) beside what was committed.
        NOT_FOUND names the session; DATA_LOSS says that values have gone."""
        heads = self._blobs.get(self._space, [b"head/0", b"head/1"])
        numbers = sorted((int(head) for head in heads if head), reverse=True)
        if not numbers:
            raise HeavywaterError("NOT_FOUND", f"session {self.name!r} is not at this cache service")
        lost: HeavywaterError | None = None
        for number in numbers:
            try:
                loaded = self._load(number)
            except HeavywaterError as error:
                lost = lost or error
                continue
            self._commit = numbers[0]
            return loaded
        assert lost is not None
        raise lost

    def _load(self, number: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        (manifest_bytes,) = self._blobs.get(self._space, [f"manifest/{number}".encode()])
        if manifest_bytes is None:
            raise self._gone(f"manifest/{number}")
        manifest = json.loads(manifest_bytes)
        if manifest["format"] != _FORMAT:
            raise HeavywaterError("FAILED_PRECONDITION", f"session format is {manifest['format']}, want {_FORMAT}")
        rows = manifest["rows"]
        for index, row in enumerate(rows):
            row["state"] = self._get(f"state/{number}/{index}", row["state_bytes"])
            pages = [self._get(f"page/{row['row']}/{page}", row["page_bytes"]) for page in range(row["full_pages"])]
            if row["tail_bytes"]:
                pages.append(self._get(f"tail/{number}/{index}", row["tail_bytes"]))
            row["pages"] = pages
            self._written[row["row"]] = row["full_pages"]
            self._page_bytes = row["page_bytes"]
        return manifest["facts"], rows

    def _forget_before(self, number: int, rows: set[str], count: int) -> None:
        """What no commit that is kept needs: values older than `number`, pages of rows that have gone."""
        old = number - 1
        keys = [f"manifest/{old}"]
        keys += [f"{what}/{old}/{index}" for what in ("state", "tail") for index in range(count)]
        for row in [row for row in self._written if row not in rows]:
            keys += [f"page/{row}/{page}" for page in range(self._written.pop(row))]
        self._blobs.erase(self._space, [part for key in keys for part in (key.encode(), *_part_keys(key, 4))])

    def _put(self, key: str, data: bytes) -> None:
        if not data:
            return
        parts = [data[first : first + _PART_BYTES] for first in range(0, len(data), _PART_BYTES)]
        keys = [key.encode(), *_part_keys(key, len(parts) - 1)]
        # A value that is there is not replaced: one of a process that ended before its commit would stay.
        self._blobs.erase(self._space, keys)
        for part_key, stored in self._blobs.put(self._space, dict(zip(keys, parts, strict=True))).items():
            if not stored:
                raise HeavywaterError(
                    "RESOURCE_EXHAUSTED",
                    f"the cache service has no room for {part_key.decode()} of session {self.name!r}",
                )

    def _get(self, key: str, size: int) -> bytes:
        more = max(-(-size // _PART_BYTES) - 1, 0)
        parts = self._blobs.get(self._space, [key.encode(), *_part_keys(key, more)])
        data = b"".join(part or b"" for part in parts)
        if len(data) != size:
            raise self._gone(key)
        return data

    def _gone(self, key: str) -> HeavywaterError:
        return HeavywaterError(
            "DATA_LOSS",
            f"{key} of session {self.name!r} has gone from the cache service (a larger blob_bytes keeps more): "
            "compute the text anew",
        )


def _part_keys(key: str, count: int) -> Iterable[bytes]:
    return [f"{key}+{part}".encode() for part in range(1, count + 1)]
