"""heavywater serve"""

from __future__ import annotations

import contextlib
import time
from typing import Annotated

import typer

from heavywater.cli.connection import LocalModel
from heavywater.cli.http import ApiKey, Host, http_endpoint
from heavywater.cli.policy import RECALL
from heavywater.local import LocalOptions, LocalServers


def serve(
    ranks: Annotated[int, typer.Option(min=1, help="Tensor-parallel workers.")] = 1,
    model: LocalModel = None,
    policy: Annotated[
        str, typer.Option(help="Of requests that name none; snapkv_h2o is the same without recall.")
    ] = RECALL,
    http: Annotated[
        int | None, typer.Option(min=0, max=65535, metavar="PORT", help="Serve the OpenAI API over HTTP there, too.")
    ] = None,
    http_host: Host = "127.0.0.1",
    api_key: ApiKey = "",
) -> None:
    """Run a cache service and a worker group on this machine until Ctrl-C; a server that dies is started again."""
    flags = {"default_policy": policy, "metrics_address": "127.0.0.1:0"}
    options = LocalOptions(ranks=ranks, model=model, worker_flags=flags, supervise=True)
    with LocalServers(options) as servers, contextlib.ExitStack() as stack:
        typer.echo(f"export HEAVYWATER_ADDRESS={servers.worker_address}")
        typer.echo(f"export HEAVYWATER_CACHE={servers.cache_address}")
        typer.echo(f"export HEAVYWATER_METRICS={','.join(servers.metrics_addresses)}")
        endpoint = None
        if http is not None:
            endpoint = stack.enter_context(
                http_endpoint(servers.worker_address, servers.cache_address, http_host, http, api_key)
            )
        while True:
            servers.check_alive()
            if endpoint is not None:
                endpoint.check_alive()
            time.sleep(0.5)
