"""heavywater eval needle"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Protocol

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from heavywater.cli.connection import Address, CacheAddress, Json, LocalModel, connected
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
from heavywater.eval.haystack import DEPTHS, Needle, make_needles
from heavywater.eval.needle import NeedleEvaluation, NeedleResult
from heavywater.eval.rows import RecallTokens, Row, rows_at_equal_bytes
from heavywater.local import find_model
from heavywater.model import Model


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
    transformers: Annotated[
        bool,
        typer.Option(
            "--transformers",
            help="Ask a model of Transformers, in this process, through heavywater.hf instead of servers.",
        ),
    ] = False,
    model: LocalModel = None,
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
    rows = rows_at_equal_bytes([scope], fractions(budgets), _recalls(recall, recall_tokens), untuned=transformers)
    content = text_or_book(text)
    whens = [True, False] if question_after is None else [question_after]
    numbers = whole_numbers("--seeds", seeds)

    def needles_of(texts: Model) -> list[Needle]:
        return [one for seed in numbers for one in make_needles(texts, content, seed, variants, tokens)]

    if transformers:
        results = _run_in_transformers(model or find_model(), needles_of, threads, rows, whens, log)
    else:
        local = dataclasses.replace(local_servers(threads, recall=recall is not False), model=model)
        with connected(address, cache, local, log) as client:
            needles = needles_of(client.get_model())

            def evaluation(on_answer: Callable[[], None]) -> NeedleEvaluation:
                return NeedleEvaluation(client, needles, parallel=parallel, on_answer=on_answer)

            results = _run(evaluation, rows, len(needles), whens, log)
    if as_json:
        print(json.dumps({"rows": [result.as_json() for result in results]}))
    else:
        Console().print(_table(results))
    _check_full(results)


class _Evaluation(Protocol):
    def run(self, row: Row, question_after: bool) -> NeedleResult: ...


def _run_in_transformers(
    path: Path,
    needles_of: Callable[[Model], list[Needle]],
    threads: int,
    rows: list[Row],
    whens: list[bool],
    log: Console,
) -> list[NeedleResult]:
    try:
        import torch

        from heavywater.eval.needle_transformers import TransformersNeedles, load
    except ImportError as error:
        raise ValueError(
            f"--transformers wants torch, transformers and the compiled module ({error}): docs/transformers.md"
        ) from None
    if threads:
        torch.set_num_threads(threads)
    with log.status(f"loading {path.name}"):
        model, texts = load(path)
    needles = needles_of(texts)

    def evaluation(on_answer: Callable[[], None]) -> TransformersNeedles:
        return TransformersNeedles(model, texts, needles, on_answer=on_answer)

    return _run(evaluation, rows, len(needles), whens, log)


def _recalls(recall: bool | None, tokens: str) -> list[RecallTokens | None]:
    with_recall: list[RecallTokens | None] = [recall_of(one) for one in tokens.split(",")]
    if recall is None:
        return [None, *with_recall]
    return with_recall if recall else [None]


def _run(
    evaluation_of: Callable[[Callable[[], None]], _Evaluation],
    rows: list[Row],
    num_needles: int,
    whens: list[bool],
    log: Console,
) -> list[NeedleResult]:
    """`evaluation_of`: what asks, given what to call after each answer."""
    results = []
    with progress_bar(log) as progress:
        task = progress.add_task("answers", total=len(rows) * num_needles * len(whens))
        evaluation = evaluation_of(lambda: progress.advance(task))
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
    columns = ("policy", "question", "budget", "bytes", "found", "by depth", "reads")
    table = Table(*columns, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for result in results:
        row = result.row
        table.add_row(
            _policy_words(row),
            _when(result),
            "-" if row.budget is None else f"{row.budget:.0%}",
            f"{result.bytes_ratio:.1%}",
            f"{result.hits}/{len(result.answers)}",
            " ".join(str(sum(one.hit for one in result.answers if one.needle.depth == depth)) for depth in DEPTHS),
            "-" if row.recall is None else f"{result.reads_mean:.1f} ({result.reads_max})",
        )
    return table


def _policy_words(row: Row) -> str:
    if row.recall is None:
        return row.policy
    return f"recall {row.recall}" if row.tuned else f"{row.policy} + recall {row.recall}"


def _check_full(results: list[NeedleResult]) -> None:
    for result in results:
        if result.row.budget is None and result.misses:
            misses = "; ".join(miss.describe() for miss in result.misses)
            raise ValueError(f"the full cache finds {result.hits} of {len(result.answers)}: {misses}")
