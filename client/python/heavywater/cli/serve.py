"""heavywater serve"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Annotated

import typer

from heavywater.cli.connection import LocalModel
from heavywater.cli.http import ApiKey, Host, http_endpoint
from heavywater.cli.policy import RECALL
from heavywater.local import LocalOptions, LocalServers
from heavywater.local_security import LocalSecurity
from heavywater.security import CA_FILE
from heavywater.serve_config import MAX_RANKS, ServeConfig, read_serve_config


def serve(
    config: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="YAML: ranks, model; under cache and worker the fields of their own configuration.",
        ),
    ] = None,
    ranks: Annotated[int | None, typer.Option(min=1, max=MAX_RANKS, help="Tensor-parallel workers [1].")] = None,
    model: LocalModel = None,
    policy: Annotated[
        str | None,
        typer.Option(help=f"Of requests that name none; snapkv_h2o is the same without recall [{RECALL}]."),
    ] = None,
    http: Annotated[
        int | None, typer.Option(min=0, max=65535, metavar="PORT", help="Serve the OpenAI API over HTTP there, too.")
    ] = None,
    http_host: Host = "127.0.0.1",
    api_key: ApiKey = "",
    tls_cert_file: Annotated[
        Path | None, typer.Option(help="PEM of the servers' certificate, for 127.0.0.1: TLS is used.")
    ] = None,
    tls_key_file: Annotated[Path | None, typer.Option(help="PEM of its key.")] = None,
    tls_ca_file: Annotated[Path | None, typer.Option(help="PEM of who signed it.")] = None,
    tls_client_ca_file: Annotated[
        Path | None, typer.Option(help="Clients must show a certificate that one of these has signed.")
    ] = None,
    tokens_file: Annotated[Path | None, typer.Option(help="Who may call: lines of `heavywater token`.")] = None,
    worker_token_file: Annotated[Path | None, typer.Option(help="The workers' own token.")] = None,
) -> None:
    """Run a cache service and a worker group on this machine until Ctrl-C; a server that dies is started again.

    Options count before what --config says.
    """
    read = read_serve_config(config) if config is not None else ServeConfig()
    flags = {"default_policy": RECALL, "metrics_address": "127.0.0.1:0", **read.worker}
    if policy is not None:
        flags["default_policy"] = policy
    security = LocalSecurity(
        tls_cert_file, tls_key_file, tls_ca_file, tls_client_ca_file, tokens_file, worker_token_file
    )
    options = LocalOptions(
        ranks=ranks or read.ranks,
        model=model or read.model,
        worker_flags=flags,
        cache_flags=read.cache,
        supervise=True,
        security=security,
    )
    with LocalServers(options) as servers, contextlib.ExitStack() as stack:
        typer.echo(f"export HEAVYWATER_ADDRESS={servers.worker_address}")
        typer.echo(f"export HEAVYWATER_CACHE={servers.cache_address}")
        typer.echo(f"export HEAVYWATER_METRICS={','.join(servers.metrics_addresses)}")
        if tls_ca_file is not None:
            typer.echo(f"export {CA_FILE}={tls_ca_file}")
        endpoint = None
        if http is not None:
            endpoint = stack.enter_context(
                http_endpoint(
                    servers.worker_address, servers.cache_address, http_host, http, api_key, security=servers.security
                )
            )
        while True:
            servers.check_alive()
            if endpoint is not None:
                endpoint.check_alive()
            time.sleep(0.5)
