"""heavywater http"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from heavywater.cli.connection import Address, CacheAddress, LocalModel, Ranks
from heavywater.cli.policy import RECALL
from heavywater.local import LocalOptions, LocalServers
from heavywater.security import Security
from heavywater.server_process import ServerError

if TYPE_CHECKING:
    from heavywater.http.server import HttpServer

DEFAULT_TURNS = 64
_MIB = 1 << 20

Host = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all of this machine's.")]
ApiKey = Annotated[
    str, typer.Option(envvar="HEAVYWATER_API_KEY", help="Wanted of every request as a bearer token [none].")
]
Names = Annotated[
    list[str] | None, typer.Option("--name", help="What clients call the model; may be repeated [its own name].")
]


def http(
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: one that is free.")] = 8000,
    host: Host = "127.0.0.1",
    api_key: ApiKey = "",
    name: Names = None,
    max_running: Annotated[int, typer.Option(min=1, help="Answers under way; more are refused (429).")] = 256,
    max_body_mib: Annotated[int, typer.Option(min=1, max=1024, help="Of a request (413).")] = 8,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for an answer (504).")] = 600.0,
    turns: Annotated[
        int, typer.Option(min=0, help="Chats whose sequences are kept for their next question, for 10 minutes.")
    ] = DEFAULT_TURNS,
    log_level: Annotated[str, typer.Option(help="error, warning, info (with each request) or debug.")] = "warning",
    policy: Annotated[str, typer.Option(help="Of requests that name none, where servers are started.")] = RECALL,
    model: LocalModel = None,
    ranks: Ranks = 1,
    address: Address = "",
    cache: CacheAddress = "",
) -> None:
    """Serve the OpenAI API over HTTP (docs/http.md) in front of running servers, or of its own, until Ctrl-C."""
    local = LocalOptions(ranks=ranks, model=model, worker_flags={"default_policy": policy}, supervise=True)
    with contextlib.ExitStack() as stack:
        servers: LocalServers | None = None
        if address:
            if model is not None:
                raise ValueError(f"--model {model} with servers that run at {address}, want one of the two")
            if ranks != 1:
                raise ValueError(f"--ranks {ranks} with servers that run at {address}, want one of the two")
        else:
            with Console(stderr=True).status("starting heavywater-cache and heavywater-worker"):
                servers = stack.enter_context(LocalServers(local))
            address, cache = servers.worker_address, servers.cache_address
        limits = {
            "max_turns": turns,
            "max_running": max_running,
            "max_body_bytes": max_body_mib * _MIB,
            "request_timeout_s": timeout,
        }
        endpoint = stack.enter_context(
            http_endpoint(
                address,
                cache,
                host,
                port,
                api_key,
                tuple(name or ()),
                log_level,
                None if servers is None else servers.security,
                **limits,
            )
        )
        while True:
            if servers is not None:
                servers.check_alive()
            endpoint.check_alive()
            time.sleep(0.5)


@contextlib.contextmanager
def http_endpoint(
    worker: str,
    cache: str,
    host: str,
    port: int,
    api_key: str = "",
    names: tuple[str, ...] = (),
    log_level: str = "warning",
    security: Security | None = None,
    **limits: float,
) -> Iterator[HttpServer]:
    """An endpoint that runs and has said where. Raises ServerError without the packages it needs."""
    try:
        from heavywater.http.options import HttpOptions
        from heavywater.http.server import HttpServer
    except ModuleNotFoundError as error:
        raise ServerError(f"no package {error.name}, of the extra 'http'; run: pip install starlette uvicorn") from None
    if log_level not in ("error", "warning", "info", "debug"):
        raise ValueError(f"--log-level {log_level}, want error, warning, info or debug")
    limits = {"max_turns": DEFAULT_TURNS, **limits}
    options = HttpOptions(worker, cache, names, api_key, security=security, **limits)  # type: ignore[arg-type]
    with HttpServer(options, host, port, log_level) as server:
        typer.echo(f"export OPENAI_BASE_URL={server.url}/v1")
        yield server
