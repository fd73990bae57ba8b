"""summary.json: what has passed so far, written again whenever a part has ended."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from gpu_check.build import BuildResult
from gpu_check.check import ABSENT, PASSED, PartResult
from gpu_check.machine import Gpu


class Summary:
    """Whoever ends the check before its time finds what was shown until then."""

    def __init__(self, file: Path, chosen: list[str]) -> None:
        """`chosen`: the names of all parts that are to run, in order."""
        self.file = file
        self.gpus: list[Gpu] = []
        self.build: BuildResult | None = None
        self.ended: list[PartResult] = []
        self.error = ""  # why nothing, or no more, has run
        self._chosen = chosen
        self._status: int | None = None
        self._write()

    def parts_ended(self, ended: list[PartResult]) -> None:
        """These, of all."""
        self.ended = list(ended)
        self._write()

    def end(self, status: int, error: str) -> None:
        """With this exit status."""
        self._status = status
        self.error = error
        self._write()

    def counts(self) -> str:
        """For the last line."""
        lists = self._lists()
        return ", ".join(f"{len(names)} {what}" for what, names in lists.items() if names or what == "passed")

    def _lists(self) -> dict[str, list[str]]:
        ended = [result.name for result in self.ended]
        return {
            "passed": [result.name for result in self.ended if result.status == PASSED],
            "failed": [result.name for result in self.ended if result.counts_as_failed],
            "absent": [result.name for result in self.ended if result.status == ABSENT],
            "not run": [name for name in self._chosen if name not in ended],
        }

    def _write(self) -> None:
        summary = {
            "exit_status": self._status,  # null: not at its end
            "error": self.error,
            **{what.replace(" ", "_"): names for what, names in self._lists().items()},
            "gpus": [asdict(gpu) for gpu in self.gpus],
            "build": asdict(self.build) if self.build is not None else None,
            "parts": [asdict(result) for result in self.ended],
        }
        self.file.write_text(json.dumps(summary, indent=1) + "\n")
