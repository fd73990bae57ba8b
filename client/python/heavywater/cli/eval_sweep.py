"""heavywater eval sweep"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from heavywater.cli.connection import Address, CacheAddress, Json, connected
from heavywater.cli.eval_common import (
    BookText,
    HeadBudgets,
    Parallel,
    Threads,
    counted,
    fractions,
    local_servers,
    progress_bar,
    text_or_book,
    whole_numbers,
)
from heavywater.client import Client
from heavywater.eval.kept import resident_shares
from heavywater.eval.measure import Window, make_windows
from heavywater.eval.plots import kept_map, quality_plot
from heavywater.eval.ppl import PplEvaluation
from heavywater.eval.results_file import ResultsFile
from heavywater.eval.rows import ADAPTIVE, BOUNDED, EVEN, FULL, ORACLE, Row, make_rows

RECALL = "recall"
_MAP_STEPS = (0, 16, 64)


def sweep(
    text: BookText = None,
    policies: Annotated[str, typer.Option(help="A comma-separated list; recall is the tuned preset.")] = ",".join(
        (*BOUNDED, RECALL)
    ),
    scopes: Annotated[str, typer.Option(help="kv_head, layer or both.")] = "kv_head",
    head_budgets: HeadBudgets = "even",
    budgets: Annotated[str, typer.Option(help="Fractions of the prompt; recall: of the full cache's bytes.")] = (
        "0.05,0.1,0.2,0.4"
    ),
    offsets: Annotated[str, typer.Option(help="Where the windows begin, in tokens.")] = "2000,27000,52000,77000",
    prompt: Annotated[int, typer.Option(min=64, help="Tokens of each window's prompt.")] = 1536,
    continuation: Annotated[int, typer.Option("--continue", min=1, help="Tokens scored in each window.")] = 256,
    state: Annotated[Path | None, typer.Option(help="Keep results here, and go on from those that it has.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Write quality.png and kept.png into this folder.")] = None,
    parallel: Parallel = 12,
    threads: Threads = 0,
    address: Address = "",
    cache: CacheAddress = "",
    as_json: Json = False,
) -> None:
    """Every policy at every budget: perplexity and divergence against the bytes that it takes.

    An interrupted run goes on where it was with the same --state.
    """
    log = Console(stderr=True)
    rows = sweep_rows(policies.split(","), scopes.split(","), fractions(budgets), head_budgets.split(","))
    if plots is not None and all(row.policy in (FULL, ORACLE) for row in rows):
        raise ValueError("--plots draws what stays and what goes: want a policy that lets something go")
    if plots is not None and address and not cache:
        raise ValueError("--plots reads the kept positions from the cache service: give --cache, too")
    content = text_or_book(text)
    settings = {"offsets": offsets, "prompt": prompt, "continue": continuation, "text": str(text) if text else None}
    results = ResultsFile(state, settings)
    if all(row.name in results for row in rows) and plots is None:
        _print(rows, results, as_json)
        return
    with connected(address, cache, local_servers(threads, recall=RECALL in policies), log) as client:
        model = client.get_model()
        windows = make_windows(model.encode(content), whole_numbers("--offsets", offsets), prompt, continuation)
        _measure(client, model.info.vocab_size, rows, windows, parallel, results, log)
        if plots is not None:
            words = f"{counted(len(windows), 'window')} of {prompt} + {continuation} tokens, {model.info.name}"
            quality_plot([results[row.name] for row in rows], plots / "quality.png", words)
            _draw_map(client, rows, windows[0], plots / "kept.png", log)
            log.print(f"plots: {plots / 'quality.png'}, {plots / 'kept.png'}", highlight=False)
    _print(rows, results, as_json)


def sweep_rows(
    policies: list[str], scopes: list[str], budgets: list[float], head_budgets: Sequence[str] = (EVEN,)
) -> list[Row]:
    """`full` first; then budget by budget, so that an interrupted run can be compared. Raises ValueError."""
    rows = make_rows([policy for policy in policies if policy != RECALL], scopes, budgets, head_budgets)
    if RECALL in policies:
        rows += [Row("snapkv_h2o", s, b, recall=64, of_bytes=True) for s in scopes for b in budgets]
    return [rows[0], *sorted(rows[1:], key=lambda row: row.budget or 0.0)]


def _measure(
    client: Client,
    vocab_size: int,
    rows: list[Row],
    windows: list[Window],
    parallel: int,
    results: ResultsFile,
    log: Console,
) -> None:
    left = [row for row in rows[1:] if row.name not in results]
    if not left and FULL in results:
        return
    wanted = [rows[0], *left]  # the others are compared with the full cache's logits
    with progress_bar(log) as progress:
        task = progress.add_task("tokens", total=len(wanted) * sum(len(window.targets) for window in windows))
        evaluation = PplEvaluation(
            client, vocab_size, windows, parallel=parallel, on_token=lambda: progress.advance(task)
        )

        def keep(result: Any) -> None:
            if result.row.name not in results:
                results.add(result.row.name, result.as_json())
            progress.console.print(
                f"{result.row.name:36} bytes {result.bytes_ratio:6.1%}  ppl {result.totals.ppl:7.3f}  "
                f"KL {result.totals.mean_kl:.4f}",
                highlight=False,
            )

        evaluation.run(wanted, keep)


def _draw_map(client: Client, rows: list[Row], window: Window, path: Path, log: Console) -> None:
    """Of the first window at the middle budget, in the first scope: what stays, a while after the prompt."""
    bounded = [row for row in rows if row.budget is not None and row.policy != ORACLE]
    budgets = sorted({row.budget for row in bounded if row.budget is not None})
    budget, scope = budgets[len(budgets) // 2], bounded[0].scope
    steps = [step for step in _MAP_STEPS if step < len(window.targets)]
    kept = {}
    mapped = [row for row in bounded if (row.budget, row.scope) == (budget, scope)]
    with progress_bar(log) as progress:
        task = progress.add_task("map of kept tokens", total=len(mapped) * len(steps))
        for row in mapped:
            shares = np.full((len(steps), len(window.prompt) + steps[-1]), np.nan)
            for index, step in enumerate(steps):
                forced = window.targets[: step + 1] if step else []
                seen = resident_shares(client, window.prompt, forced, row)
                shares[index, : len(seen)] = seen
                progress.advance(task)
            name = "recall" if row.recall else row.policy
            kept[name if row.head_budgets == EVEN else f"{name}, {row.head_budgets}"] = shares
    kept_map(kept, steps, len(window.prompt), path)


def _print(rows: list[Row], results: ResultsFile, as_json: bool) -> None:
    found = [results[row.name] for row in rows]
    if as_json:
        print(json.dumps({"rows": found}))
        return
    table = Table(
        "policy", "scope", "budget", "device bytes", "ppl", "full / policy", "KL", "same", box=box.SIMPLE_HEAD
    )
    for row in found:
        table.add_row(
            "recall" if row["recall"] else row["policy"],
            (row["scope"] or "-") + (", adaptive" if row.get("head_budgets") == ADAPTIVE else ""),
            "-" if row["budget"] is None else f"{row['budget']:.0%}",
            f"{row['bytes_ratio']:.1%}",
            f"{row['ppl']:.2f}",
            f"{found[0]['ppl'] / row['ppl']:.1%}",
            f"{row['kl']:.4f}",
            f"{row['agree']:.1%}",
        )
    Console().print(table)
