"""heavywater load"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console

from heavywater.cli.connection import Address, CacheAddress, Json, LocalModel, Ranks
from heavywater.cli.eval_common import counted, progress_bar
from heavywater.cli.policy import (
    Budget,
    Decay,
    DeviceRatio,
    Exposure,
    HeadBudgets,
    Policy,
    Positions,
    Recall,
    RecallTokens,
    Scope,
    Sinks,
    policy_options,
)
from heavywater.client import Client
from heavywater.load.requests import LoadPlan
from heavywater.load.run import LoadResult, Target, run_load
from heavywater.local import LocalOptions, LocalServers

_HOST_PORT = re.compile(r"[^/,]+:\d+")
_CLOSED_CLIENTS = 8
_OPEN_CLIENTS = 64


def load(
    clients: Annotated[
        int, typer.Option(min=0, help="Sequences under way at once; with --rate: at most [8, with --rate 64].")
    ] = 0,
    rate: Annotated[
        float, typer.Option(min=0.0, help="Open loop: sequences arrive at random, so many a second in the mean.")
    ] = 0.0,
    sequences: Annotated[int, typer.Option(min=1, help="In all.")] = 100,
    prompt_tokens: Annotated[str, typer.Option(help="MIN,MAX: each prompt's length is drawn from these.")] = "64,256",
    new_tokens: Annotated[str, typer.Option(help="MIN,MAX: likewise, of new tokens.")] = "32,32",
    cancel: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of the clients that leave early, at a random token.")
    ] = 0.0,
    policy: Policy = "snapkv_h2o",
    scope: Scope = "layer",
    budget: Budget = 0.2,
    recall: Recall = None,
    recall_tokens: RecallTokens = "",
    device_ratio: DeviceRatio = 0.0,
    sinks: Sinks = None,
    decay: Decay = 0.0,
    exposure: Exposure = 0.0,
    positions: Positions = "",
    head_budgets: HeadBudgets = "",
    seed: Annotated[int, typer.Option(help="Of lengths, prompts, arrivals and cancels.")] = 1,
    model: LocalModel = None,
    ranks: Ranks = 1,
    threads: Annotated[int, typer.Option(min=0, help="Of each worker it starts [all cores, shared by them].")] = 0,
    address: Address = "",
    cache: CacheAddress = "",
    metrics: Annotated[
        str, typer.Option(help="With --address: host:port of each worker's metrics, by rank, for the leak check.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Load servers with sequences that come and go; measures latency and checks that nothing is left behind."""
    log = Console(stderr=True)
    options = policy_options(
        policy,
        scope,
        budget,
        recall,
        recall_tokens,
        device_ratio,
        sinks=sinks,
        decay=decay,
        exposure=exposure,
        positions=positions,
        head_budgets=head_budgets,
    )
    if not math.isfinite(rate):
        raise ValueError(f"--rate {rate}, want a number of sequences a second")
    plan = LoadPlan(
        sequences,
        _range("--prompt-tokens", prompt_tokens),
        _range("--new-tokens", new_tokens),
        cancel_share=cancel,
        rate=rate or None,
        seed=seed,
    )
    plan.check()
    clients = clients or (_OPEN_CLIENTS if rate else _CLOSED_CLIENTS)
    local = LocalOptions(
        ranks=ranks,
        model=model,
        worker_flags={
            "compute_threads": threads or max(1, (os.cpu_count() or 1) // ranks),
            "metrics_address": "127.0.0.1:0",
        },
    )
    with _target(address, cache, metrics, local, log) as target, progress_bar(log) as progress:
        task = progress.add_task("sequences", total=sequences)
        result = run_load(target, plan, clients, options, lambda outcome: progress.advance(task))
    for message in result.messages:
        log.print(f"error: {message}", highlight=False, markup=False)
    asked: dict[str, object] = {
        "clients": clients,
        "rate": rate or None,
        "cancel": cancel,
        "policy": policy,
        "seed": seed,
    }
    if as_json:
        print(json.dumps({**asked, **result.row()}))
    else:
        print(_describe(result))
    if not result.good:
        raise typer.Exit(1)


@contextlib.contextmanager
def _target(address: str, cache: str, metrics: str, local: LocalOptions, log: Console) -> Iterator[Target]:
    """The servers named, or servers of its own that end with the command."""
    if address:
        if local.model is not None:
            raise ValueError(f"--model {local.model} with servers that run at {address}, want one of the two")
        if not cache:
            raise ValueError("sequences are closed at the cache service, and it says what is left: give --cache, too")
        addresses = [one for one in metrics.split(",") if one]
        for one in addresses:
            if not _HOST_PORT.fullmatch(one):
                raise ValueError(f"--metrics {one}, want host:port of each worker's metrics, with commas between")
        yield Target(lambda: Client(worker=address, cache=cache), metrics_addresses=addresses)
        return
    if metrics:
        raise ValueError("--metrics without --address, want both: of servers that it starts it knows them")
    with contextlib.ExitStack() as stack:
        with log.status(f"starting heavywater-cache and {local.ranks} heavywater-worker"):
            servers = stack.enter_context(LocalServers(local))
        yield Target(servers.client, servers.processes, [worker.metrics_address() for worker in servers.workers])
        servers.check_alive()


def _range(option: str, text: str) -> tuple[int, int]:
    """ "64,256" or "64". Raises ValueError."""
    parts = text.split(",")
    if len(parts) > 2 or not all(part.isdecimal() for part in parts):
        raise ValueError(f"{option} {text}, want MIN,MAX or one number")
    return int(parts[0]), int(parts[-1])


def _describe(result: LoadResult) -> str:
    figures = result.figures
    lines = [
        f"{counted(figures.sequences, 'sequence')} in {figures.duration_s:.1f} s: {figures.completed} completed, "
        f"{figures.cancelled} cancelled, refused {_codes(figures.refused)}, unexpected errors {_codes(figures.errors)}",
        f"{figures.tokens_per_s:.1f} tokens/s; first token {_quantiles(figures.time_to_first_token_ms)}; "
        f"next token {_quantiles(figures.time_per_token_ms)}",
        f"left behind: {', '.join(result.leaked) or 'nothing'}",
    ]
    if figures.late_ms > 100:  # less is this machine at work
        lines.append(f"requests waited for a free client, at most {figures.late_ms:.0f} ms")
    return "\n".join(lines)


def _codes(codes: dict[str, int]) -> str:
    return ", ".join(f"{count} {code}" for code, count in codes.items()) or "0"


def _quantiles(quantiles: dict[str, float] | None) -> str:
    if quantiles is None:
        return "-"
    return ", ".join(f"{name} {value:.1f} ms" for name, value in quantiles.items())
