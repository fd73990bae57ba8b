"""heavywater eval qa"""

from __future__ import annotations

import json
from pathlib import Path
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
    text_or_book,
)
from heavywater.cli.eval_sweep import RECALL, sweep_rows
from heavywater.eval.book_questions import make_questions
from heavywater.eval.qa import QaEvaluation
from heavywater.eval.results_file import ResultsFile
from heavywater.eval.rows import BOUNDED


def qa(
    question_after: Annotated[
        bool,
        typer.Option("--question-after", help="Ask once the text is compressed [the policy sees the question, too]."),
    ] = False,
    policies: Annotated[str, typer.Option(help="A comma-separated list; recall is the tuned preset.")] = ",".join(
        (*BOUNDED, RECALL)
    ),
    scopes: Annotated[str, typer.Option(help="kv_head, layer or both.")] = "kv_head",
    budgets: Annotated[str, typer.Option(help="Fractions of the prompt; recall: of the full cache's bytes.")] = "0.2",
    documents: Annotated[int, typer.Option(min=1, help="Texts.")] = 30,
    per_document: Annotated[int, typer.Option(min=1, help="Questions about each, at most.")] = 5,
    tokens: Annotated[int, typer.Option(min=400, help="Of each text, about.")] = 1500,
    text: BookText = None,
    state: Annotated[Path | None, typer.Option(help="Keep results here, and go on from those that it has.")] = None,
    parallel: Parallel = 6,
    threads: Threads = 0,
    address: Address = "",
    cache: CacheAddress = "",
    as_json: Json = False,
) -> None:
    """Questions about long texts: which name stands at this place? (heavywater/eval/book_questions.py)"""
    log = Console(stderr=True)
    rows = sweep_rows(policies.split(","), scopes.split(","), fractions(budgets))
    settings = {
        "question_after": question_after,
        "documents": documents,
        "per_document": per_document,
        "tokens": tokens,
        "text": str(text) if text else None,
    }
    results = ResultsFile(state, settings)
    missing = [row for row in rows if row.name not in results]
    if missing:
        content = text_or_book(text)
        with connected(address, cache, local_servers(threads, recall=RECALL in policies), log) as client:
            questions = make_questions(client.get_model(), content, documents, per_document, tokens)
            log.print(f"{len(questions)} questions about {documents} texts of {tokens} tokens", highlight=False)
            with progress_bar(log) as progress:
                task = progress.add_task("answers", total=len(missing) * len(questions))
                evaluation = QaEvaluation(
                    client,
                    questions,
                    question_after=question_after,
                    parallel=parallel,
                    on_answer=lambda: progress.advance(task),
                )
                for row in missing:
                    result = evaluation.run(row)
                    results.add(row.name, result.as_json())
                    progress.console.print(f"{row.name:36} {result.right} of {result.total}", highlight=False)
    found = [results[row.name] for row in rows]
    if as_json:
        print(json.dumps({"rows": found}))
        return
    table = Table("policy", "scope", "budget", "device bytes", "right", "of full", box=box.SIMPLE_HEAD)
    for one in found:
        table.add_row(
            RECALL if one["recall"] else one["policy"],
            one["scope"] or "-",
            "-" if one["budget"] is None else f"{one['budget']:.0%}",
            f"{one['bytes_ratio']:.1%}",
            f"{one['right']}/{one['total']}",
            f"{one['right'] / max(1, found[0]['right']):.0%}",
        )
    Console().print(table)
