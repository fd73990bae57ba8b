"""Results that survive an interruption: one JSON object a line, for one set of settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class ResultsFile:
    """Appends results by name, and knows those of an earlier run with the same settings.

    A last line that an interruption cut off is dropped. Raises ValueError when the file
    holds results of other settings: they cannot be compared with new ones.
    """

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        self._path = path
        self._results: dict[str, Any] = {}
        wanted = json.loads(json.dumps(settings))
        if path is None:
            return
        lines = _whole_lines(path) if path.exists() else []
        if lines and lines[0] != {"settings": wanted}:
            raise ValueError(f"{path} holds results of other settings, {lines[0].get('settings')}, want {wanted}")
        self._results = {line["name"]: line["result"] for line in lines[1:]}
        path.parent.mkdir(parents=True, exist_ok=True)
        records = lines or [{"settings": wanted}]
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")

    def __contains__(self, name: str) -> bool:
        return name in self._results

    def __getitem__(self, name: str) -> Any:
        return self._results[name]

    def add(self, name: str, result: Any) -> None:
        """Remembers a result; on disk when this returns."""
        self._results[name] = result
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"name": name, "result": result}) + "\n")


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
