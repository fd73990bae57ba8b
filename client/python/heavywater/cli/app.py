"""The `heavywater` command: its subcommands and common options."""

from __future__ import annotations

import typer

from heavywater.version import __version__

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


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


def main() -> None:
    """Entry point of the console script."""
    app()
