"""heavywater eval ppl"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from heavywater.book import read_book
from heavywater.cli.connection import Address, CacheAddress, Json, connected
from heavywater.eval.measure import make_windows
from heavywater.eval.ppl import PplEvaluation, RowResult
from heavywater.eval.rows import Row, make_rows, published_rows
from heavywater.local import LocalOptions

_HOST_BYTES = 3 << 30

eval_app = typer.Typer(no_args_is_help=True, help="Measure the quality of the cache policies.")


@eval_app.callback()
def _group() -> None:
    """Measure the quality of the cache policies."""


@eval_app.command("ppl")
def ppl(
    text: Annotated[
        Path | None, typer.Option(help="A text file [Northanger Abbey, of Debian's r-cran-janeaustenr].")
    ] = None,
    offsets: Annotated[str, typer.Option(help="Where the windows begin, in tokens.")] = "2000,27000,52000,77000",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each window's prompt.")] = 1536,
    continuation: Annotated[int, typer.Option("--continue", min=1, help="Tokens scored in each window.")] = 512,
    budgets: Annotated[str, typer.Option(help="Fractions of the prompt.")] = "0.1,0.2,0.4",
    policies: Annotated[str, typer.Option(help="Instead of the standard rows: these policies, ...")] = "",
    scopes: Annotated[str, typer.Option(help="... each in these scopes (kv_head, layer).")] = "",
    dump: Annotated[Path | None, typer.Option(help="Write ids, logits and kept positions here, as npz.")] = None,
    parallel: Annotated[int, typer.Option(min=1, help="Sequences that run at once.")] = 12,
    threads: Annotated[int, typer.Option(min=0, help="Of the worker it starts [all cores].")] = 0,
    address: Address = "",
    cache: CacheAddress = "",
    as_json: Json = False,
) -> None:
    """Perplexity of a text under each policy and budget, and the divergence from the full cache."""
    log = Console(stderr=True)
    rows = _rows(policies, scopes, [float(budget) for budget in budgets.split(",")])
    content = text.read_text(encoding="utf-8") if text else read_book()
    if dump is not None:
        dump.mkdir(parents=True, exist_ok=True)
    if dump is not None and address and not cache:
        raise ValueError("--dump reads the kept positions from the cache service: give --cache, too")
    with connected(address, cache, _local(threads), log) as client:
        model = client.get_model()
        windows = make_windows(model.encode(content), [int(o) for o in offsets.split(",")], prompt, continuation)
        with _progress(log) as progress:
            task = progress.add_task("tokens", total=len(rows) * len(windows) * continuation)
            evaluation = PplEvaluation(
                client,
                model.info.vocab_size,
                windows,
                parallel=parallel,
                dump=dump,
                on_token=lambda: progress.advance(task),
            )
            results = evaluation.run(rows, lambda result: progress.console.print(_line(result), highlight=False))
    if as_json:
        print(json.dumps({"rows": [result.as_json() for result in results]}))
    else:
        Console().print(_table(results))


def _rows(policies: str, scopes: str, budgets: list[float]) -> list[Row]:
    if not policies and not scopes:
        return published_rows(budgets)
    chosen = policies.split(",") if policies else ["streaming", "h2o", "snapkv_h2o"]
    return make_rows(chosen, scopes.split(",") if scopes else ["kv_head"], budgets)


def _local(threads: int) -> LocalOptions:
    """Float32, one worker. The host tier may not exceed what the machine has for shared memory."""
    host_bytes = min(_HOST_BYTES, shutil.disk_usage("/dev/shm").free * 3 // 4)
    return LocalOptions(
        worker_flags={
            "kv_dtype": "fp32",
            "compute_threads": threads or os.cpu_count() or 1,
            "device_memory_bytes": 4 << 30,
            "on_host_full": "drop",  # figures do not depend on what is demoted
        },
        cache_flags={"host_bytes": host_bytes},
    )


def _progress(log: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=log)


def _line(result: RowResult) -> str:
    return f"{result.row.name:24} ppl {result.totals.ppl:7.3f}  KL {result.totals.mean_kl:.4f}"


def _table(results: list[RowResult]) -> Table:
    table = Table("policy", "scope", "budget", "device bytes", "ppl", "KL", "same token")
    for result in results:
        table.add_row(
            result.row.policy,
            result.row.scope or "-",
            "-" if result.row.budget is None else f"{result.row.budget:.0%}",
            f"{result.bytes_ratio:.1%}",
            f"{result.totals.ppl:.2f}",
            f"{result.totals.mean_kl:.4f}",
            f"{result.totals.agree:.1%}",
        )
    return table
