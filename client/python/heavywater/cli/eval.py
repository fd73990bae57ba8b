"""heavywater eval"""

from __future__ import annotations

import typer

from heavywater.cli.eval_hypothesis import hypothesis
from heavywater.cli.eval_long import long
from heavywater.cli.eval_needle import needle
from heavywater.cli.eval_ppl import ppl
from heavywater.cli.eval_qa import qa
from heavywater.cli.eval_sweep import sweep
from heavywater.cli.help import Command

eval_app = typer.Typer(no_args_is_help=True, help="Measure the quality of the cache policies.")
for command in (hypothesis, long, needle, ppl, qa, sweep):
    eval_app.command(cls=Command)(command)
