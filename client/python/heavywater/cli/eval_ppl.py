"""heavywater eval ppl"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from heavywater.cli.connection import Address, CacheAddress, Json, connected
from heavywater.cli.eval_common import (
    BookText,
    HeadBudgets,
    Parallel,
    Threads,
    fractions,
    local_servers,
    progress_bar,
    recall_of,
    text_or_book,
    whole_numbers,
)
from heavywater.eval.measure import make_windows
from heavywater.eval.ppl import PplEvaluation, RowResult
from heavywater.eval.rows import EVEN, Row, make_rows, published_rows, rows_at_equal_bytes


def ppl(
    text: BookText = None,
    offsets: Annotated[str, typer.Option(help="Where the windows begin, in tokens.")] = "2000,27000,52000,77000",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each window's prompt.")] = 1536,
    continuation: Annotated[int, typer.Option("--continue", min=1, help="Tokens scored in each window.")] = 512,
    budgets: Annotated[
        str, typer.Option(help="Fractions of the prompt; with --recall: of the full cache's bytes.")
    ] = "0.1,0.2,0.4",
    policies: Annotated[str, typer.Option(help="Instead of the standard rows: these policies, ...")] = "",
    scopes: Annotated[str, typer.Option(help="... each in these scopes (kv_head, layer).")] = "",
    head_budgets: HeadBudgets = "even",
    recall: Annotated[
        bool,
        typer.Option("--recall", help="Instead of the standard rows: snapkv_h2o without and with recall, equal bytes."),
    ] = False,
    recall_tokens: Annotated[str, typer.Option(help='With --recall: read at most, a list or "all".')] = "64",
    dump: Annotated[Path | None, typer.Option(help="Write ids, logits and kept positions here, as npz.")] = None,
    parallel: Parallel = 12,
    threads: Threads = 0,
    address: Address = "",
    cache: CacheAddress = "",
    as_json: Json = False,
) -> None:
    """Perplexity of a text under each policy and budget, and the divergence from the full cache."""
    log = Console(stderr=True)
    if recall:
        if head_budgets != EVEN:
            raise ValueError(
                f"--head-budgets {head_budgets} with --recall, want {EVEN}: promotion needs sets of one size"
            )
        rows = _recall_rows(policies, scopes, fractions(budgets), recall_tokens)
    else:
        rows = _rows(policies, scopes, fractions(budgets), head_budgets.split(","))
    content = text_or_book(text)
    if dump is not None:
        dump.mkdir(parents=True, exist_ok=True)
    if dump is not None and address and not cache:
        raise ValueError("--dump reads the kept positions from the cache service: give --cache, too")
    with connected(address, cache, local_servers(threads, recall=recall), log) as client:
        model = client.get_model()
        windows = make_windows(model.encode(content), whole_numbers("--offsets", offsets), prompt, continuation)
        with progress_bar(log) as progress:
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


def _rows(policies: str, scopes: str, budgets: list[float], head_budgets: list[str]) -> list[Row]:
    if not policies and not scopes and head_budgets == [EVEN]:
        return published_rows(budgets)
    chosen = policies.split(",") if policies else ["streaming", "h2o", "snapkv_h2o"]
    return make_rows(chosen, scopes.split(",") if scopes else ["kv_head"], budgets, head_budgets)


def _recall_rows(policies: str, scopes: str, budgets: list[float], recall_tokens: str) -> list[Row]:
    if policies:
        raise ValueError("--recall compares snapkv_h2o with and without recall: leave --policies out")
    recalls = [None, *(recall_of(tokens) for tokens in recall_tokens.split(","))]
    return rows_at_equal_bytes(scopes.split(",") if scopes else ["layer"], budgets, recalls)


def _line(result: RowResult) -> str:
    return f"{result.row.name:32} ppl {result.totals.ppl:7.3f}  KL {result.totals.mean_kl:.4f}"


def _table(results: list[RowResult]) -> Table:
    table = Table("policy", "scope", "budget", "recall", "device bytes", "ppl", "KL", "same token")
    for result in results:
        table.add_row(
            result.row.policy,
            result.row.scope_words,
            "-" if result.row.budget is None else f"{result.row.budget:.0%}",
            "-" if result.row.recall is None else str(result.row.recall),
            f"{result.bytes_ratio:.1%}",
            f"{result.totals.ppl:.2f}",
            f"{result.totals.mean_kl:.4f}",
            f"{result.totals.agree:.1%}",
        )
    return table
