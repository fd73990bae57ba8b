"""heavywater top"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from heavywater.cli.connection import Json
from heavywater.client import Client
from heavywater.errors import HeavywaterError
from heavywater.top.rates import Rates, rates_between
from heavywater.top.report import as_json
from heavywater.top.sample import take_sample
from heavywater.top.view import View

_WINDOW_S = 8.0  # of the rates: plans, and with them the tokens of a sequence, are reported now and then
_ENDLESS = 10_000  # lines, of what is no terminal

Metrics = Annotated[
    str,
    typer.Option(
        "--metrics",
        envvar="HEAVYWATER_METRICS",
        help="host:port of each rank's metrics, by rank, with commas between; without, only the cache service is seen.",
    ),
]


def top(
    cache: Annotated[
        str, typer.Option("--cache", envvar="HEAVYWATER_CACHE", help="host:port of the cache service.")
    ] = "127.0.0.1:7700",
    metrics: Metrics = "",
    interval: Annotated[float, typer.Option(min=0.1, max=60.0, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look twice, an interval apart, print, and end.")] = False,
    as_json_: Json = False,
) -> None:
    """Show what runs now: tiers, ranks, and where the tokens of each sequence are. Ctrl-C ends."""
    addresses = [address for address in metrics.split(",") if address]
    if as_json_ and not once:
        raise ValueError("--json without --once, want both")
    if not once and not sys.stdout.isatty():
        raise ValueError("standard output is no terminal, want --once")
    with Client(cache=cache, timeout_s=5.0) as client:
        if once:
            _once(client, addresses, interval, as_json_)
        else:
            _watch(client, addresses, interval)


def _once(client: Client, addresses: list[str], interval: float, json_only: bool) -> None:
    before = take_sample(client, addresses)
    time.sleep(interval)
    after = take_sample(client, addresses)
    rates = rates_between(before, after)
    if json_only:
        print(json.dumps(as_json(after, rates)))
        return
    view = View()
    view.note(rates)
    console = Console()
    height = console.height if console.is_terminal else _ENDLESS
    console.print(view.draw(after, rates, height, console.width))


def _watch(client: Client, addresses: list[str], interval: float) -> None:
    view, console = View(), Console()
    samples = deque([take_sample(client, addresses)])
    rates: Rates = rates_between(None, samples[-1])
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            problem = ""
            try:
                sample = take_sample(client, addresses)
            except HeavywaterError as error:
                problem = f"the cache service does not answer ({error.code}); what it last said:"
            else:
                samples.append(sample)
                while len(samples) > 2 and sample.at_s - samples[1].at_s > _WINDOW_S:
                    samples.popleft()
                rates = rates_between(samples[0], sample)
                view.note(rates)
            live.update(view.draw(samples[-1], rates, console.height, console.width, problem), refresh=True)
            time.sleep(interval)
