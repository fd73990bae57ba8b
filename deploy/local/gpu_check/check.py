"""Runs the parts within the time that is left, and keeps what each has shown."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpu_check.build import find_program
from gpu_check.machine import cuda_tool
from gpu_check.parts import Part
from gpu_check.runner import run_logged, tail

PASSED, FAILED, ABSENT, NO_TIME = "passed", "failed", "absent", "no time left"
_SANITIZER_EXIT = 86  # unlike any that a test program has


@dataclass(frozen=True)
class PartResult:
    """What became of one part."""

    name: str
    shows: str
    status: str
    seconds: float
    reason: str  # of what is not passed
    details: dict[str, Any]

    @property
    def counts_as_failed(self) -> bool:
        """A tool that the machine lacks is no failure; a part without time has shown nothing."""
        return self.status in (FAILED, NO_TIME)


def run_parts(
    parts: list[Part],
    build: Path,
    built: Sequence[str],
    results: Path,
    deadline_s: float,
    say: Callable[[str], None],
    done: Callable[[list[PartResult]], None] = lambda ended: None,
) -> list[PartResult]:
    """One after the other; each leaves its JSON in `results` when it is done. `deadline_s` is of time.monotonic().

    `built`: the programs that may run. `done` hears of all parts that have ended whenever one has."""
    ended = []
    for part in parts:
        result = _run(part, build, built, results, deadline_s)
        (results / f"{part.name}.json").write_text(json.dumps(asdict(result), indent=1) + "\n")
        say(f"{part.name:<12} {result.seconds:6.1f} s  {result.status:<8} {part.shows}{_figures(result)}")
        if result.reason:
            say(result.reason)
        ended.append(result)
        done(ended)
    return ended


def _run(part: Part, build: Path, built: Sequence[str], results: Path, deadline_s: float) -> PartResult:
    def result(
        status: str, seconds: float = 0.0, reason: str = "", details: dict[str, Any] | None = None
    ) -> PartResult:
        return PartResult(part.name, part.shows, status, seconds, reason, details or {})

    program = find_program(build, part.program) if part.program in built else None
    if program is None:
        return result(FAILED, reason=f"  {part.program} was not built: see {build / 'build.log'}")
    left_s = deadline_s - time.monotonic()
    if left_s < 5:
        return result(NO_TIME)
    output, log = results / "logs" / f"{part.name}.out.json", results / "logs" / f"{part.name}.log"
    output.unlink(missing_ok=True)
    command = [str(program), *(word.format(output=output) for word in part.arguments)]
    if part.sanitizer:
        tool = cuda_tool("compute-sanitizer", build)
        if tool is None:
            return result(ABSENT, reason="  compute-sanitizer is not on this machine")
        command = [tool, "--tool", part.sanitizer, "--error-exitcode", str(_SANITIZER_EXIT), *command]
    ended = run_logged(command, log, min(part.timeout_s, left_s), part.environment)
    if ended.code is None:
        return result(FAILED, ended.seconds, f"  still running after {ended.seconds:.0f} s\n{tail(log)}")
    try:
        details = part.details(output, log)
    except (OSError, ValueError, KeyError, IndexError) as error:
        return result(FAILED, ended.seconds, f"  exit status {ended.code}, no report ({error})\n{tail(log)}")
    if ended.code != 0:
        return result(FAILED, ended.seconds, f"  exit status {ended.code}\n{tail(log)}", details)
    if details.get("tests") == 0:
        return result(FAILED, ended.seconds, "  the program has no such test", details)
    return result(PASSED, ended.seconds, "", details)


def _figures(result: PartResult) -> str:
    if "tests" in result.details:
        skipped = len(result.details["skipped"])
        return f" ({result.details['tests']} tests{f', {skipped} skipped' if skipped else ''})"
    return ""
