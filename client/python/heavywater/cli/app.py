"""The `heavywater` command: its subcommands and common options."""

from __future__ import annotations

import sys

import typer

from heavywater.cli.chat import chat
from heavywater.cli.diff import diff
from heavywater.cli.doctor import doctor
from heavywater.cli.eval import eval_app
from heavywater.cli.generate import generate
from heavywater.cli.http import http
from heavywater.cli.inspect import inspect
from heavywater.cli.load import load
from heavywater.cli.plan_memory import plan_memory_command
from heavywater.cli.replay import replay
from heavywater.cli.serve import serve
from heavywater.cli.soak import soak_command
from heavywater.cli.top import top
from heavywater.errors import HeavywaterError
from heavywater.local import exit_on_signals
from heavywater.server_process import ServerError
from heavywater.version import __version__

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
app.command()(generate)
app.command()(chat)
app.command()(inspect)
app.command()(top)
app.command()(diff)
app.command()(serve)
app.command()(http)
app.command()(doctor)
app.command()(load)
app.command()(replay)
app.command("soak")(soak_command)
app.command("plan-memory")(plan_memory_command)
app.add_typer(eval_app, name="eval")


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"heavywater {__version__}")
        raise typer.Exit()


@app.callback()
def common(
    version: bool = typer.Option(
        False, "--version", is_eager=True, callback=_print_version, help="Print the version and exit."
    ),
) -> None:
    """Client of Heavywater, a distributed KV-cache service for long-context language models."""


def _hint(error: HeavywaterError) -> str:
    """What to do about it, where that is known."""
    if error.code == "UNAVAILABLE" and "connect" in error.message.lower():
        return "\nhint: no server answers there; `heavywater serve` starts one and prints its addresses"
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
