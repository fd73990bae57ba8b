"""heavywater replay"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from heavywater.cli.connection import Json
from heavywater.cli.eval_common import fractions, progress_bar
from heavywater.eval.rows import BOUNDED, ORACLE
from heavywater.replay import RECALL, policy_request, replay_policy


def replay(
    trace: Annotated[Path, typer.Argument(help="As heavywater-worker --record_dir or heavywater.trace wrote it.")],
    policies: Annotated[str, typer.Option(help="A comma-separated list; recall is the tuned preset.")] = ",".join(
        (*BOUNDED, RECALL, ORACLE)
    ),
    scope: Annotated[str, typer.Option(help="kv_head or layer.")] = "kv_head",
    budgets: Annotated[str, typer.Option(help="Fractions of the prompt; recall: of the full cache's bytes.")] = "0.2",
    threads: Annotated[int, typer.Option(min=1, help="Of the machine.")] = 1,
    as_json: Json = False,
) -> None:
    """What policies would have kept of recorded traffic, without a model.

    Attention mass that was attended to, error against attention to everything, and how
    often the most attended position was there.
    """
    log = Console(stderr=True)
    if not trace.is_file():
        raise ValueError(f"{trace} is no file")
    wanted = [(policy, budget) for budget in fractions(budgets) for policy in policies.split(",")]
    rows = []
    with progress_bar(log) as progress:
        task = progress.add_task("policies", total=len(wanted))
        for policy, budget in wanted:
            rows.append(
                replay_policy(trace, policy_request(trace, policy, scope, budget), threads) | {"budget": budget}
            )
            progress.advance(task)
    if as_json:
        print(json.dumps({"rows": rows}))
    else:
        Console().print(_table(rows))


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("policy", "scope", "budget", "device bytes", "mass kept", "error", "same top", box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(
            row["policy"],
            row["scope"],
            f"{row['budget']:.0%}",
            f"{row['bytes_ratio']:.1%}",
            f"{row['mass_kept']:.2%}",
            f"{row['error']:.4f}",
            f"{row['agreement']:.1%}",
        )
    return table
