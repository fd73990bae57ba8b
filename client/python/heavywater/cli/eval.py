"""heavywater eval"""

from __future__ import annotations

import typer

from heavywater.cli.eval_needle import needle
from heavywater.cli.eval_ppl import ppl
from heavywater.cli.eval_sweep import sweep

eval_app = typer.Typer(no_args_is_help=True, help="Measure the quality of the cache policies.")
eval_app.command()(needle)
eval_app.command()(ppl)
eval_app.command()(sweep)
