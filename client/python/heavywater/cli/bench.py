"""heavywater bench"""

from __future__ import annotations

import subprocess

import typer

from heavywater.server_process import find_binary

# All after the first word, --help included.
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


def bench(context: typer.Context) -> None:
    """Run heavywater-bench: kernels, tiers, the runner, each beside something else on this machine (docs/speed.md).

    attention, recall, tier, growth, decode, comm or rpc comes first; what follows is that benchmark's own.
    """
    # What is missing of the servers' programs is said as elsewhere.
    raise typer.Exit(subprocess.run([find_binary("heavywater-bench"), *context.args], check=False).returncode)
