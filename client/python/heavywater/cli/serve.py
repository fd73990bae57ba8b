"""heavywater serve"""

from __future__ import annotations

import time
from typing import Annotated

import typer

from heavywater.cli.connection import LocalModel
from heavywater.cli.policy import RECALL
from heavywater.local import LocalOptions, LocalServers


def serve(
    ranks: Annotated[int, typer.Option(min=1, help="Tensor-parallel workers.")] = 1,
    model: LocalModel = None,
    policy: Annotated[
        str, typer.Option(help="Of requests that name none; snapkv_h2o is the same without recall.")
    ] = RECALL,
) -> None:
    """Run a cache service and a worker group on this machine until Ctrl-C; a server that dies is started again."""
    options = LocalOptions(ranks=ranks, model=model, worker_flags={"default_policy": policy}, supervise=True)
    with LocalServers(options) as servers:
        typer.echo(f"export HEAVYWATER_ADDRESS={servers.worker_address}")
        typer.echo(f"export HEAVYWATER_CACHE={servers.cache_address}")
        while True:
            servers.check_alive()
            time.sleep(0.5)
