"""heavywater doctor"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from heavywater.cli.connection import Json
from heavywater.doctor.finding import Finding, Verdict
from heavywater.doctor.run import examine

_STYLES = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAILED: "bold red"}


def doctor(
    cache: Annotated[
        str, typer.Option("--cache", envvar="HEAVYWATER_CACHE", help="host:port of the cache service")
    ] = "",
    address: Annotated[
        list[str] | None,
        typer.Option(envvar="HEAVYWATER_ADDRESS", help="host:port of rank 0 of a worker group; may be repeated"),
    ] = None,
    metrics: Annotated[list[str] | None, typer.Option(help="host:port of a metrics endpoint; may be repeated")] = None,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Of each question.")] = 5.0,
    as_json: Json = False,
) -> None:
    """Look for what keeps a deployment from working: health, versions, shared memory, interfaces, clocks.

    Run it where a worker would run (in its pod, on its node). Exit status 1 when something failed.
    """
    if not cache and not address and not metrics:
        raise ValueError("no address is given, want --cache, --address or --metrics")
    findings = examine(cache, address or [], metrics or [], timeout_s)
    if as_json:
        print(json.dumps({"findings": [asdict(finding) for finding in findings]}))
    else:
        Console().print(_table(findings))
    if any(finding.failed for finding in findings):
        raise typer.Exit(1)


def _table(findings: list[Finding]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("where", "what", "", "found"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        verdict = f"[{_STYLES[finding.verdict]}]{finding.verdict}[/]"
        table.add_row(finding.where, finding.what, verdict, finding.text)
    return table
