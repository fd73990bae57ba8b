"""The `heavywater` command: its subcommands and common options."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from heavywater.cli.admin import admin_app
from heavywater.cli.bench import PASSED_ON, bench
from heavywater.cli.chat import chat
from heavywater.cli.diff import diff
from heavywater.cli.doctor import doctor
from heavywater.cli.eval import eval_app
from heavywater.cli.generate import generate
from heavywater.cli.help import ASK, MEASURE, SERVERS, Command
from heavywater.cli.http import http
from heavywater.cli.inspect import inspect
from heavywater.cli.load import load
from heavywater.cli.plan_memory import plan_memory_command
from heavywater.cli.replay import replay
from heavywater.cli.serve import serve
from heavywater.cli.soak import soak_command
from heavywater.cli.suspend import resume, suspend
from heavywater.cli.token import token
from heavywater.cli.top import top
from heavywater.errors import HeavywaterError
from heavywater.local import exit_on_signals
from heavywater.security import CA_FILE, CERT_FILE, KEY_FILE, SERVER_NAME, TOKEN_FILE
from heavywater.server_process import ServerError
from heavywater.version import __version__

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
for _panel, _commands in {
    ASK: (generate, chat, diff),
    SERVERS: (serve, http, top, inspect, suspend, resume, doctor, token),
    MEASURE: (load, replay),
}.items():
    for _command in _commands:
        app.command(cls=Command, rich_help_panel=_panel)(_command)
app.command(cls=Command, rich_help_panel=MEASURE, context_settings=PASSED_ON)(bench)
app.command("soak", cls=Command, rich_help_panel=MEASURE)(soak_command)
app.command("plan-memory", cls=Command, rich_help_panel=MEASURE)(plan_memory_command)
app.add_typer(eval_app, name="eval", rich_help_panel=MEASURE)
app.add_typer(admin_app, name="admin", rich_help_panel=SERVERS)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"heavywater {__version__}")
        raise typer.Exit()


@app.callback()
def common(
    version: bool = typer.Option(
        False, "--version", is_eager=True, callback=_print_version, help="Print the version and exit."
    ),
    tls_ca_file: Annotated[
        str, typer.Option(envvar=CA_FILE, help="PEM of who signs the servers' certificates: TLS is used.")
    ] = "",
    tls_cert_file: Annotated[
        str, typer.Option(envvar=CERT_FILE, help="PEM of a certificate to show, where servers want one.")
    ] = "",
    tls_key_file: Annotated[str, typer.Option(envvar=KEY_FILE, help="PEM of its key.")] = "",
    tls_server_name: Annotated[
        str, typer.Option(envvar=SERVER_NAME, help="What their certificates are made out to [the address's host].")
    ] = "",
    token_file: Annotated[
        str, typer.Option(envvar=TOKEN_FILE, help="File with the token to send; or HEAVYWATER_TOKEN has it.")
    ] = "",
) -> None:
    """Client of Heavywater, a distributed KV-cache service for long-context language models."""
    # From here every client has it, in this process and those that it starts.
    given = {
        CA_FILE: tls_ca_file,
        CERT_FILE: tls_cert_file,
        KEY_FILE: tls_key_file,
        SERVER_NAME: tls_server_name,
        TOKEN_FILE: token_file,
    }
    os.environ.update({name: value for name, value in given.items() if value})


def _hint(error: HeavywaterError) -> str:
    """What to do about it, where that is known."""
    if error.code == "UNAVAILABLE" and "connect" in error.message.lower():
        return "\nhint: no server answers there; `heavywater serve` starts one and prints its addresses"
    if error.code == "UNAUTHENTICATED":
        return f"\nhint: HEAVYWATER_TOKEN, or --token-file (also {TOKEN_FILE}), says who you are"
    if error.code == "UNIMPLEMENTED":
        return (
            "\nhint: that server has no such call; is it the worker's address (rank 0, with a model) where the cache "
            "service's is wanted, or the other way round?"
        )
    return ""


def main() -> None:
    """Entry point of the console script. Expected failures are one message, not a traceback."""
    exit_on_signals()
    try:
        app()
    except HeavywaterError as error:
        print(f"error: {error}{_hint(error)}", file=sys.stderr)
        sys.exit(1)
    except (ServerError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
