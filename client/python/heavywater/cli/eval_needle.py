"""heavywater eval needle"""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from heavywater.cli.connection import Address, CacheAddress, Json, connected
from heavywater.cli.eval_common import (
    BookText,
    Parallel,
    Threads,
    fractions,
    local_servers,
    progress_bar,
    recall_of,
    text_or_book,
    whole_numbers,
)
from heavywater.client import Client
from heavywater.eval.haystack import DEPTHS, Needle, make_needles
from heavywater.eval.needle import NeedleEvaluation, NeedleResult
from heavywater.eval.rows import RecallTokens, Row, rows_at_equal_bytes


def needle(
    question_after: Annotated[
        bool | None,
        typer.Option(
            "--question-after/--question-before",
            help="Ask once the text is compressed, or let the policy see the question, too [both, in turn].",
        ),
    ] = None,
    budgets: Annotated[str, typer.Option(help="Fractions of the full cache's bytes.")] = "0.2,0.1",
    recall: Annotated[
        bool | None, typer.Option("--recall/--no-recall", help="Only rows with recall, or without [both].")
    ] = None,
    recall_tokens: Annotated[str, typer.Option(help='Demoted tokens that a query reads at most, or "all".')] = "64",
    seeds: Annotated[str, typer.Option(help="Of the texts, names, codes: a comma-separated list.")] = "0",
    tokens: Annotated[int, typer.Option(min=64, help="Of each text, about.")] = 1500,
    variants: Annotated[int, typer.Option(min=1, help="Texts for each depth and seed.")] = 5,
    text: BookText = None,
    scope: Annotated[str, typer.Option(help="layer or kv_head.")] = "layer",
    parallel: Parallel = 6,
    threads: Threads = 0,
    address: Address = "",
    cache: CacheAddress = "",
    as_json: Json = False,
) -> None:
    """Ask for a detail deep in a text, with and without recall at the same bytes on the device.

    Fails when the full cache itself does not find them all: then the model is at fault.
    """
    log = Console(stderr=True)
    rows = rows_at_equal_bytes([scope], fractions(budgets), _recalls(recall, recall_tokens))
    content = text_or_book(text)
    whens = [True, False] if question_after is None else [question_after]
    with connected(address, cache, local_servers(threads, recall=recall is not False), log) as client:
        model = client.get_model()
        needles = [
            one
            for seed in whole_numbers("--seeds", seeds)
            for one in make_needles(model, content, seed, variants, tokens)
        ]
        results = _run(client, rows, needles, whens, parallel, log)
    if as_json:
        print(json.dumps({"rows": [result.as_json() for result in results]}))
    else:
        Console().print(_table(results))
    _check_full(results)


def _recalls(recall: bool | None, tokens: str) -> list[RecallTokens | None]:
    with_recall: list[RecallTokens | None] = [recall_of(one) for one in tokens.split(",")]
    if recall is None:
        return [None, *with_recall]
    return with_recall if recall else [None]


def _run(
    client: Client, rows: list[Row], needles: list[Needle], whens: list[bool], parallel: int, log: Console
) -> list[NeedleResult]:
    results = []
    with progress_bar(log) as progress:
        task = progress.add_task("answers", total=len(rows) * len(needles) * len(whens))
        evaluation = NeedleEvaluation(client, needles, parallel=parallel, on_answer=lambda: progress.advance(task))
        for when in whens:
            for row in rows:
                results.append(evaluation.run(row, when))
                _report(results[-1], progress.console)
    return results


def _report(result: NeedleResult, console: Console) -> None:
    reads = f", read {result.reads_mean:.1f} in place, at most {result.reads_max}" if result.row.recall else ""
    console.print(
        f"{result.row.name:32} question {_when(result)}: {result.hits} of {len(result.answers)}, "
        f"{result.bytes_ratio:.1%} of the bytes{reads}",
        highlight=False,
    )
    for miss in result.misses:
        console.print(f"  {miss.describe()}", highlight=False, style="dim")


def _when(result: NeedleResult) -> str:
    return "after" if result.question_after else "before"


def _table(results: list[NeedleResult]) -> Table:
    columns = ("policy", "question", "budget", "bytes", "found", "by depth", "reads (most)")
    table = Table(*columns, box=box.SIMPLE_HEAD)
    for result in results:
        row = result.row
        table.add_row(
            row.policy if row.recall is None else f"recall {row.recall}",
            _when(result),
            "-" if row.budget is None else f"{row.budget:.0%}",
            f"{result.bytes_ratio:.1%}",
            f"{result.hits}/{len(result.answers)}",
            " ".join(str(sum(one.hit for one in result.answers if one.needle.depth == depth)) for depth in DEPTHS),
            "-" if row.recall is None else f"{result.reads_mean:.1f} ({result.reads_max})",
        )
    return table


def _check_full(results: list[NeedleResult]) -> None:
    for result in results:
        if result.row.budget is None and result.misses:
            misses = "; ".join(miss.describe() for miss in result.misses)
            raise ValueError(f"the full cache finds {result.hits} of {len(result.answers)}: {misses}")
