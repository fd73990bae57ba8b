"""The parts of the check, the most important first: which program shows what."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Names of targets and of their programs.
BACKEND = "cuda_device_test"
NCCL = "nccl_device_test"
SYSTEM = "cuda_system_test"
BENCH = "heavywater-bench"
TARGETS = (BACKEND, SYSTEM, NCCL, BENCH)

# Cases that run under compute-sanitizer, which makes everything many times slower: small
# ones that together start each kernel. First those whose threads share memory.
SHARING = (
    "GainsOfAQueryAddUpToOnePerQueryHead",
    "APromptIsCausal",
    "GainsOfSlotsAndPicksAddUpToOnePerQueryHead",
    "SelectDropsTheHigherPositionOfEqualScoresWhenOneMustGo",
    "VictimsAreOccupiedSlotsThatTheMaskLeavesOut",
    "ChooseChannelsTakesTheLargestOfQueryEnergyTimesKeyVariance",
)
SANITIZED = (
    *SHARING,
    "AppendStoresTheRowsInTheirSlotsAndNothingElse",
    "TheBytesWrittenThroughAreTheBytesStored",
    "GatherMovesTheKeptRowsAndFreesTheOtherSlots",
    "ReleaseFreesTheSlotsOfOneSetOnly",
    "CollectSumsTheHeadsOfASharedSetAndClearsThem",
    "SumRowsAddsEachRowWithoutLosingABit",
    "AddScoresDecaysFirstRoundingHalfToEven",
    "MaxPoolingTakesTheLargestNeighbour",
    "ObserveQueriesKeepsTheSquaresOfTheLastQueries",
    "ConstantZeroAndOutlierChannelsStayFinite",
    "PromotedSlotsHoldTheHostsRowsTheScoresGivenAndNoGains",
)


@dataclass(frozen=True)
class Part:
    """One program's run. `details` reads what it has written."""

    name: str
    shows: str
    program: str
    arguments: tuple[str, ...]
    timeout_s: float
    details: Callable[[Path, Path], dict[str, Any]]  # from its output file and its log
    sanitizer: str = ""  # the tool of compute-sanitizer under which it runs
    environment: dict[str, str] = field(default_factory=dict)


def parts() -> list[Part]:
    """In the order in which they run."""
    return [
        _tests("backend", "every operation against the oracle, on the device", BACKEND, 70),
        _tests("memcheck", "no access outside memory", BACKEND, 45, cases=SANITIZED, sanitizer="memcheck"),
        _tests("racecheck", "no race in shared memory", BACKEND, 30, cases=SHARING, sanitizer="racecheck"),
        _bench("attention", "a step's attention beside the device's bandwidth", 40),
        _bench("recall", "a step with recall beside the full cache's attention", 40),
        _bench("step", "a whole step of a Llama beside the time of reading what it must", 45),
        _tests("nccl", "the conformance suite over NCCL, on all GPUs", NCCL, 40),
        _tests(
            "ranks",
            "2 to 4 ranks on one GPU keep what one rank keeps; recall as the reference",
            SYSTEM,
            40,
            cases=("DeviceRanks", "DeviceLlama", "DeviceRecall"),
        ),
        _tests("graph", "a captured step replays to the same result", SYSTEM, 20, cases=("Graph",)),
    ]


def _tests(
    name: str, shows: str, program: str, timeout_s: float, cases: tuple[str, ...] = ("",), sanitizer: str = ""
) -> Part:
    return Part(
        name=name,
        shows=shows,
        program=program,
        arguments=("--gtest_filter=" + ":".join(f"*{case}*" for case in cases), "--gtest_output=json:{output}"),
        timeout_s=timeout_s,
        details=_counts,
        sanitizer=sanitizer,
    )


def _bench(name: str, shows: str, timeout_s: float) -> Part:
    return Part(
        name=name,
        shows=shows,
        program=BENCH,
        arguments=(name, "--backend", "cuda", "--json"),
        timeout_s=timeout_s,
        details=_figures,
    )


def _counts(output: Path, log: Path) -> dict[str, Any]:
    """GoogleTest's own report: how many, and which failed or were skipped."""
    report = json.loads(output.read_text(encoding="utf-8"))
    cases = [(suite["name"], case) for suite in report["testsuites"] for case in suite["testsuite"]]
    skipped = [f"{suite}.{case['name']}" for suite, case in cases if case["result"] == "SKIPPED"]
    failed = [f"{suite}.{case['name']}" for suite, case in cases if case.get("failures")]
    return {"tests": report["tests"], "failed": failed, "skipped": skipped}


def _figures(output: Path, log: Path) -> dict[str, Any]:
    """The benchmark's one JSON object: the last line that is one."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("{")]
    figures: dict[str, Any] = json.loads(lines[-1])
    return figures
