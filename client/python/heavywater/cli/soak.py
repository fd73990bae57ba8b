"""heavywater soak"""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from heavywater.cli.connection import Json
from heavywater.local import LocalOptions, LocalServers
from heavywater.soak import NEW_TOKENS, SEQUENCE_LEASE_MS, soak


def soak_command(
    kills: Annotated[int, typer.Option(min=1, help="Generations, in each of which one process is killed.")] = 50,
    ranks: Annotated[int, typer.Option(min=1, help="Tensor-parallel workers.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the moments and processes.")] = 1,
    new_tokens: Annotated[int, typer.Option(min=8, help="Of each generation.")] = NEW_TOKENS,
    as_json: Json = False,
) -> None:
    """Kill workers and the cache service (kill -9) in the middle of generations; texts must come out as without."""
    log = Console(stderr=True)
    options = LocalOptions(ranks=ranks, cache_flags={"sequence_lease_ms": SEQUENCE_LEASE_MS}, supervise=True)
    with LocalServers(options) as servers:
        figures = soak(servers, kills, seed, new_tokens, lambda line: log.print(line, highlight=False))
    if as_json:
        print(json.dumps(figures.row()))
    else:
        print(
            f"{figures.kills} kills: {figures.equal} texts equal to the undisturbed run's, {figures.errors} errors, "
            f"{figures.leaked} bytes leaked, {figures.pins} pins left"
        )
    if figures.equal != figures.kills or figures.leaked or figures.pins:
        raise typer.Exit(1)
