"""heavywater doctor"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from heavywater.cli.connection import Json
from heavywater.cli.top import Metrics
from heavywater.doctor.finding import FAIL, OK, WARN, Finding
from heavywater.doctor.installation import (
    BINARIES,
    check_binary,
    check_extras,
    check_model,
    check_packages,
    check_python,
)
from heavywater.doctor.machine import (
    PORTS,
    check_gpu,
    check_memory,
    check_open_files,
    check_port,
    check_processor,
    check_shared_memory,
)
from heavywater.doctor.servers import check_cache, check_metrics, check_worker

_MARKS = {OK: ("ok", "green"), WARN: ("warn", "bold yellow"), FAIL: ("FAIL", "bold red")}


def doctor(
    address: Annotated[
        str, typer.Option(envvar="HEAVYWATER_ADDRESS", help="host:port of workers, commas between.")
    ] = "",
    cache: Annotated[
        str, typer.Option("--cache", envvar="HEAVYWATER_CACHE", help="host:port of the cache service.")
    ] = "",
    metrics: Metrics = "",
    model: Annotated[Path | None, typer.Option(help="Of servers to start [HEAVYWATER_MODEL].")] = None,
    as_json: Json = False,
) -> None:
    """Look for what would keep Heavywater from running here, or its servers from being reached, and say what to do.

    Ends with 1 where something fails; warnings do not.
    """
    findings: list[Finding] = []
    console = Console()
    for finding in _findings(address, cache, metrics, model):
        findings.append(finding)
        if not as_json:
            _print(console, finding)
    failed = any(finding.state == FAIL for finding in findings)
    if as_json:
        print(json.dumps({"healthy": not failed, "findings": [finding.row() for finding in findings]}))
    else:
        counts = ", ".join(f"{sum(one.state == state for one in findings)} {state}" for state in _MARKS)
        console.print(counts, style="bold", highlight=False)
    if failed:
        raise typer.Exit(1)


def _findings(address: str, cache: str, metrics: str, model: Path | None) -> Iterator[Finding]:
    """One after the other, as they are found. Without servers named, those that could be started matter more."""
    yield check_python()
    yield check_packages()
    yield check_extras()
    for name in BINARIES:
        yield check_binary(name)
    yield check_model(model)
    yield check_processor()
    yield check_memory()
    yield check_shared_memory()
    yield check_open_files()
    yield check_gpu()
    if not cache:
        for port, who in PORTS.items():
            yield check_port(port, who)
    for one in _split(address):
        yield from check_worker(one)
    for one in _split(cache):
        yield from check_cache(one)
    for one in _split(metrics):
        yield from check_metrics(one)


def _split(addresses: str) -> list[str]:
    return [one.strip() for one in addresses.split(",") if one.strip()]


def _print(console: Console, finding: Finding) -> None:
    mark, style = _MARKS[finding.state]
    table = Table.grid(padding=(0, 1))
    table.add_column(width=4)
    table.add_column(width=24, overflow="fold")
    table.add_column(overflow="fold")
    found = Text(finding.found)
    if finding.advice:
        found.append(f"\n{finding.advice}", style="italic")
    table.add_row(Text(mark, style=style), Text(finding.what), found)
    console.print(table)
