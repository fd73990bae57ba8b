"""heavywater eval long"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from heavywater.cli.connection import Address, CacheAddress, Json, connected
from heavywater.cli.eval_common import BookText, Parallel, Threads, local_servers, progress_bar, text_or_book
from heavywater.eval.long import LongResult, make_long_rows, make_marks, measure_long


def long(
    text: BookText = None,
    tokens: Annotated[int, typer.Option(min=2, help="Of the text, the prompt among them.")] = 20000,
    prompt: Annotated[int, typer.Option(min=1, help="The text's first tokens, read at once.")] = 1024,
    offset: Annotated[int, typer.Option(min=0, help="Where it begins, in tokens.")] = 2000,
    budget: Annotated[int, typer.Option(min=2, help="Slots a layer.")] = 1024,
    sinks: Annotated[int, typer.Option(min=0, help="First tokens that never go.")] = 4,
    policies: Annotated[str, typer.Option(help="A comma-separated list.")] = "streaming",
    scope: Annotated[str, typer.Option(help="kv_head or layer.")] = "layer",
    every: Annotated[int, typer.Option(min=1, help="Perplexity is told after so many tokens.")] = 4000,
    parallel: Parallel = 4,
    threads: Threads = 0,
    address: Address = "",
    cache: CacheAddress = "",
    as_json: Json = False,
) -> None:
    """Perplexity of a text longer than the model's context, at places within the cache.

    Tokens are seen at their place among those that are kept (positions: cache_relative).
    """
    log = Console(stderr=True)
    rows = make_long_rows(policies.split(","), scope, budget, sinks)
    marks = make_marks(every, prompt, tokens)
    content = text_or_book(text)
    with connected(address, cache, local_servers(threads, recall=False), log) as client:
        ids = client.get_model().encode(content)[offset : offset + tokens]
        if len(ids) < tokens:
            raise ValueError(f"the text has {len(ids)} tokens from {offset} on, want {tokens}")
        with progress_bar(log) as progress, ThreadPoolExecutor(parallel) as pool:
            task = progress.add_task("tokens", total=len(rows) * (tokens - prompt))
            pending = [
                pool.submit(measure_long, client, row, ids, prompt, lambda: progress.advance(task)) for row in rows
            ]
            results = [future.result() for future in pending]
    if as_json:
        print(json.dumps({"rows": [result.as_json(marks) for result in results]}))
    else:
        Console().print(_table(results, marks))


def _table(results: list[LongResult], marks: list[int]) -> Table:
    table = Table("policy", "scope", "slots", *(f"to {mark:,}" for mark in marks), box=box.SIMPLE_HEAD)
    for result in results:
        figures = (f"{ppl:.2f}" for ppl in result.as_json(marks)["ppl"])
        table.add_row(result.row.policy, result.row.scope, f"{result.row.budget_tokens}", *figures)
    return table
